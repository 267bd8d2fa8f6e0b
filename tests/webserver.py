"""A web server with one file, for tests: it breaks off, stalls, refuses and changes its mind."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves while it is entered.

    Args:
        breaks: after how many bytes the first answers, in turn, break off.
        statuses: what it answers first, in turn, instead of the file.
        ranges: whether it knows ranges.
        tell_length: whether it says how long the file is.
    """

    def __init__(self, data: bytes, breaks=(), statuses=(), ranges=True, tell_length=True):
        self.data, self.breaks, self.statuses = data, list(breaks), list(statuses)
        self.ranges, self.tell_length = ranges, tell_length
        self.etag = '"one"'
        self.asked: list[tuple[str | None, str | None]] = []
        self.sent = 0
        self.stalls = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.answer(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/pictures.zip"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        span, condition = request.headers["Range"], request.headers["If-Range"]
        self.asked.append((span, condition))
        if self.statuses:
            request.send_error(self.statuses.pop(0))
            return
        first = int(span.removeprefix("bytes=").removesuffix("-")) if span else 0
        if not self.ranges or condition not in (None, self.etag):
            first = 0
        if first and first >= len(self.data):
            request.send_error(416)
            return
        request.send_response(206 if first else 200)
        if first:
            request.send_header("Content-Range", f"bytes {first}-{len(self.data) - 1}/{len(self.data)}")
        if self.tell_length:
            request.send_header("Content-Length", str(len(self.data) - first))
        request.send_header("ETag", self.etag)
        request.end_headers()
        last = first + self.breaks.pop(0) if self.breaks else len(self.data)
        request.wfile.write(self.data[first:last])
        request.wfile.flush()
        self.sent += last - first
        if self.stalls.is_set() and last < len(self.data):
            time.sleep(60)
        request.close_connection = True

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
