"""A fake API server for the tests of volumes and secrets."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from servers import TestServer


class Store:
    """A fake API server that stores objects. ``answer`` can override a response: (method, path, body) -> (status, bytes)."""

    def __init__(self) -> None:
        self.objects: dict[str, dict] = {}
        self.answer = lambda method, path, body: None
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and body are two packets: the second would wait 40 ms

            def handle_any(self) -> None:
                url = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                response = store.answer(self.command, url.path, body)
                if response is not None and response[0] == 0:  # raw bytes instead of an HTTP response
                    self.wfile.write(response[1])
                    self.close_connection = True
                    return
                if response is None:
                    status, result = store.act(self.command, url.path, parse_qs(url.query), json.loads(body or b"null"))
                    response = status, json.dumps(result).encode()
                self.send_response(response[0])
                self.send_header("Content-Length", str(len(response[1])))
                self.end_headers()
                self.wfile.write(response[1])

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any

            def log_message(self, *_) -> None:
                pass

        self.server = TestServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def act(self, method: str, path: str, query: dict, body: dict | None) -> tuple[int, dict]:
        if method == "POST":
            path += "/" + body["metadata"]["name"]
            if path in self.objects:
                return 409, {"message": "already exists", "reason": "AlreadyExists"}
            if "dryRun" not in query:
                metadata = body["metadata"] | {"creationTimestamp": "2026-01-01T00:00:00Z"}
                self.objects[path] = body | {"metadata": metadata, "status": {"phase": "Pending"}}
            return 201, body
        if method == "PUT":
            metadata = self.objects[path]["metadata"] | body["metadata"]
            self.objects[path] = body | {"metadata": metadata}
            return 200, body
        if path.rpartition("/")[2] in ("pods", "events", "secrets", "persistentvolumeclaims", "storageclasses"):
            return 200, {"items": self.below(path + "/", query), "metadata": {"resourceVersion": "1"}}
        if path not in self.objects:
            return 404, {"message": "not found"}
        return 200, self.objects.pop(path) if method == "DELETE" else self.objects[path]

    def below(self, path: str, query: dict) -> list[dict]:
        labels = dict(pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair)
        items = [item for path_of_item, item in self.objects.items() if path_of_item.startswith(path)]
        return [item for item in items if labels.items() <= item["metadata"].get("labels", {}).items()]

    def put(self, path: str, **item) -> dict:
        self.objects[path] = {"metadata": {"name": path.rpartition("/")[2]}, "spec": {}, "status": {}} | item
        return self.objects[path]


NS = "/api/v1/namespaces/ns"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
DEFAULT = {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}, "name": "standard"}
