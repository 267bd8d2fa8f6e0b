"""Downloads that a server redirects."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from worldsize.data.fetch import download
from worldsize.errors import UserError


def serve(
    handler: type[http.server.BaseHTTPRequestHandler], context: ssl.SSLContext | None = None
) -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def servers(tmp_path: Path, monkeypatch) -> Iterator[tuple[str, str]]:
    """The URLs of an encrypted server and of a plain one. ``/NAME?to=URL`` redirects to the URL, others answer `content`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            target = self.path.partition("?to=")[2]
            self.send_response(302 if target else 200)
            self.send_header("Location", target) if target else self.send_header("Content-Length", "7")
            self.end_headers()
            self.wfile.write(b"" if target else b"content")

        def log_message(self, *_: object) -> None:
            return

    key, certificate = tmp_path / "key.pem", tmp_path / "ca.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, timeout=60, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    plain, encrypted = serve(Handler), serve(Handler, context)
    yield f"https://localhost:{encrypted.server_address[1]}", f"http://127.0.0.1:{plain.server_address[1]}"
    for server in (plain, encrypted):
        server.shutdown()
        server.server_close()


def test_a_redirect_does_not_leave_the_encryption(servers):
    encrypted, plain = servers
    with pytest.raises(UserError, match=rf"redirects to {plain}/a\.zip, which is not encrypted: to take"):
        download.from_web(f"{encrypted}/a.zip?to={plain}/a.zip?secret=1")(0, "")


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (1, 1)])
def test_other_redirects_are_followed(servers, first, second):
    remote = download.from_web(f"{servers[first]}/a.zip?to={servers[second]}/a.zip")(0, "")
    assert remote.read(100) == b"content"
    remote.close()
