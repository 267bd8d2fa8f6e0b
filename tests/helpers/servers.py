"""HTTP servers for tests."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer


class TestServer(ThreadingHTTPServer):
    """Prints no traceback if a client disconnects, which many tests do on purpose."""

    __test__ = False
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
