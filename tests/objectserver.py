"""An API server that keeps what it is sent and answers as a test wants, for the tests of volumes and secrets."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Store:
    """An API server that keeps what it is sent; ``answer`` may answer first: (method, path, body) -> (status, bytes)."""

    def __init__(self) -> None:
        self.objects: dict[str, dict] = {}
        self.answer = lambda method, path, body: None
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                url = urlsplit(self.path)
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                said = store.answer(self.command, url.path, text)
                if said is not None and said[0] == 0:  # not even HTTP
                    self.wfile.write(said[1])
                    self.close_connection = True
                    return
                if said is None:
                    status, found = store.act(self.command, url.path, parse_qs(url.query), json.loads(text or b"null"))
                    said = status, json.dumps(found).encode()
                self.send_response(said[0])
                self.send_header("Content-Length", str(len(said[1])))
                self.end_headers()
                self.wfile.write(said[1])

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any

            def log_message(self, *_) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def act(self, method: str, path: str, query: dict, body: dict | None) -> tuple[int, dict]:
        if method == "POST":
            path += "/" + body["metadata"]["name"]
            if path in self.objects:
                return 409, {"message": "already exists", "reason": "AlreadyExists"}
            if "dryRun" not in query:
                about = body["metadata"] | {"creationTimestamp": "2026-01-01T00:00:00Z"}
                self.objects[path] = body | {"metadata": about, "status": {"phase": "Pending"}}
            return 201, body
        if method == "PUT":
            about = self.objects[path]["metadata"] | body["metadata"]
            self.objects[path] = body | {"metadata": about}
            return 200, body
        if path.rpartition("/")[2] in ("pods", "events", "secrets", "persistentvolumeclaims", "storageclasses"):
            return 200, {"items": self.below(path + "/", query), "metadata": {"resourceVersion": "1"}}
        if path not in self.objects:
            return 404, {"message": "not found"}
        return 200, self.objects.pop(path) if method == "DELETE" else self.objects[path]

    def below(self, path: str, query: dict) -> list[dict]:
        labels = dict(pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair)
        items = [one for where, one in self.objects.items() if where.startswith(path)]
        return [one for one in items if labels.items() <= one["metadata"].get("labels", {}).items()]

    def put(self, path: str, **one) -> dict:
        self.objects[path] = {"metadata": {"name": path.rpartition("/")[2]}, "spec": {}, "status": {}} | one
        return self.objects[path]


NS = "/api/v1/namespaces/ns"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
DEFAULT = {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}, "name": "standard"}
