"""A test web server with one file: it can break connections, stall, refuse requests and change the file."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler

from servers import TestServer


class Server:
    """Serves inside a ``with`` block.

    Args:
        breaks: byte counts after which the first responses break off, one entry per response.
        statuses: status codes of the first responses, instead of the file.
        ranges: whether it supports range requests.
        send_length: whether it sends Content-Length.
    """

    def __init__(self, data: bytes, breaks=(), statuses=(), ranges=True, send_length=True):
        self.data, self.breaks, self.statuses = data, list(breaks), list(statuses)
        self.ranges, self.send_length = ranges, send_length
        self.etag = '"one"'
        self.requests: list[tuple[str | None, str | None]] = []
        self.sent = 0
        self.stalls = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.answer(self)

            def log_message(self, *_):
                pass

        self._server = TestServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/images.zip"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        byte_range, condition = request.headers["Range"], request.headers["If-Range"]
        self.requests.append((byte_range, condition))
        if self.statuses:
            request.send_error(self.statuses.pop(0))
            return
        first = int(byte_range.removeprefix("bytes=").removesuffix("-")) if byte_range else 0
        if not self.ranges or condition not in (None, self.etag):
            first = 0
        if first and first >= len(self.data):
            request.send_error(416)
            return
        request.send_response(206 if first else 200)
        if first:
            request.send_header("Content-Range", f"bytes {first}-{len(self.data) - 1}/{len(self.data)}")
        if self.send_length:
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
