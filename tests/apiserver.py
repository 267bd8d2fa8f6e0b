"""A pretended cluster: an API server of a few lines, for clusters that no test machine is.

It has what a test puts there, and no operators: what is created in it stays as it was sent.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from worldsize.launch.kinds import KINDS
from worldsize.launch.pod import labels, training_labels


def node(name="n0", labels=(), taints=(), **allocatable):
    amounts = {"cpu": "8", "memory": "32Gi", "pods": "110"} | allocatable
    return {
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {"taints": list(taints)},
        "status": {"allocatable": {key.replace("__", "/"): amount for key, amount in amounts.items()}},
    }


def gpu_node(name, gpus, **more):
    amounts = node(name, **more)
    amounts["status"]["allocatable"]["nvidia.com/gpu"] = str(gpus)
    return amounts


def running(where, phase="Running", name="other", run="", **amounts):
    names = {"gpu": "nvidia.com/gpu"}
    requests = {names.get(key, key): str(amount) for key, amount in amounts.items()}
    return {
        "metadata": {"name": name, "labels": training_labels(run)},
        "spec": {"nodeName": where, "containers": [{"resources": {"requests": requests}}]},
        "status": {"phase": phase},
    }


def quota(hard, used=None, **spec):
    return {
        "metadata": {"name": "team"},
        "spec": {"hard": hard, **spec},
        "status": {"hard": hard, "used": used or {}},
    }


def is_in(world, kind, phase=None, name="r50", **metadata):
    """A job of ours that is in this phase."""
    conditions = [{"type": phase, "status": "True", "message": f"it is {phase}"}] if phase else []
    world.add(kind, name, metadata={"labels": labels(name)} | metadata, status={"conditions": conditions})


CRDS = {
    "kubeflow.org/v1": ["pytorchjobs"],
    "kubeflow.org/v2beta1": ["mpijobs"],
    "trainer.kubeflow.org/v1alpha1": ["trainjobs", "trainingruntimes", "clustertrainingruntimes"],
    "jobset.x-k8s.io/v1alpha2": ["jobsets"],
}
PLURALS = {kind.plural: kind for kind in KINDS.values()}


class World:
    """The state of a pretended cluster: objects by URL, what the user may not do, what admission says to new objects."""

    def __init__(self):
        self.objects = {}
        self.served = {version: list(plurals) for version, plurals in CRDS.items()}
        self.trainjob_fields = ["runtimeRef", "trainer", "runtimePatches"]
        self.version = "v1.34.10"
        self.denied = set()  # (verb, resource)
        self.dead = set()  # paths at which the connection breaks
        self.refusals = {}
        self.latency = 0.0  # s, of every answer
        self.requests = 0
        self.add("Namespace", "team")
        self.add("Node", **gpu_node("n0", 8))
        self.add("Node", **gpu_node("n1", 8))
        self.volume("data", "ReadWriteMany")

    def add(self, kind, name=None, /, **body):
        metadata = {"name": name, "namespace": "team"} | body.pop("metadata", {})
        self.objects[KINDS[kind].path(metadata["namespace"], metadata["name"])] = {"metadata": metadata, **body}

    def refuse(self, kind, status, message):
        """Have this said to whatever of the kind is created."""
        self.refusals[kind] = (status, message)

    def volume(self, name, *modes, phase="Bound", **spec):
        self.add("PersistentVolumeClaim", name, spec={"accessModes": list(modes), **spec}, status={"phase": phase})

    def answer(self, method, path, query, body):
        self.requests += 1
        time.sleep(self.latency)
        if path == "/version":
            return 200, {"gitVersion": self.version}
        if body and body["kind"] == "SelfSubjectAccessReview":
            asked = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (asked["resource"], asked["subresource"])))
            return 201, {"status": {"allowed": (asked["verb"], resource) not in self.denied}}
        if path.startswith("/openapi/v3"):
            spec = {"properties": {name: {} for name in self.trainjob_fields}}
            schemas = {"org.kubeflow.trainer.v1alpha1.TrainJob": {"properties": {"spec": spec}}}
            return 200, {"components": {"schemas": schemas}}
        if path.startswith("/apis/") and path.removeprefix("/apis/") in self.served:
            return 200, {"resources": [{"name": name} for name in self.served[path.removeprefix("/apis/")]]}
        if method == "POST":
            return self.create(path, query, body)
        return self.read(path, query)

    def create(self, path, query, body):
        assert query["dryRun"] == ["All"], "preflight must change nothing"
        group = path.split("/namespaces/")[0].removeprefix("/apis/")
        if group in CRDS and path.rpartition("/")[2] not in self.served.get(group, []):
            return 404, {"message": "the server could not find the requested resource"}
        if ("create", path.rpartition("/")[2]) in self.denied:
            return forbidden("create", path.rpartition("/")[2])
        if body["kind"] in self.refusals:
            status, message = self.refusals[body["kind"]]
            return status, {"message": message}
        if f"{path}/{body['metadata']['name']}" in self.objects:
            return 409, {"message": "already exists", "reason": "AlreadyExists"}
        return 201, body

    def read(self, path, query):
        *_, before, last = path.split("/")
        verb, plural = ("list", last) if last in PLURALS else ("get", before)
        if (verb, plural) in self.denied:
            return forbidden(verb, plural)
        if verb == "get":
            return (200, self.objects[path]) if path in self.objects else (404, {"message": "not found"})
        wanted = dict(re.findall(r"metadata\.(name)=([^,]+)", query.get("fieldSelector", [""])[0]))
        labels = dict(re.findall(r"([^=,]+)=([^,]+)", query.get("labelSelector", [""])[0]))
        pattern = re.escape(path.removesuffix(last)) + rf"(namespaces/[^/]+/)?{last}/[^/]+"
        items = [one for url, one in self.objects.items() if re.fullmatch(pattern, url)]
        items = [one for one in items if wanted.items() <= one["metadata"].items()]
        items = [one for one in items if labels.items() <= one["metadata"].get("labels", {}).items()]
        return 200, {"items": items, "metadata": {"resourceVersion": "1"}}


class BrokenOff(bytes):
    """The first part of an answer whose connection is lost."""


class KeepingWorld(World):
    """One that keeps what is created, changed and deleted in it; what an object owns goes with it. Its pods have logs."""

    def __init__(self):
        super().__init__()
        self.logs = {}  # by pod: lines with timestamps
        self.logs_before = {}  # the same of the container's run before
        self.breaks = []  # after how many lines a log breaks off, for one answer after the other

    def add(self, kind, name=None, /, **body):
        super().add(kind, name, **body)
        for path, one in self.objects.items():
            one["metadata"] = {"uid": path, "creationTimestamp": "2026-01-01T00:00:00Z"} | one["metadata"]

    def answer(self, method, path, query, body):
        if "watch" in query:
            time.sleep(0.05)
            return 200, b""
        if path.endswith("/log"):
            return self.log(path.split("/")[-2], query)
        if method == "DELETE":
            return (200, self.remove(path)) if path in self.objects else (404, {"message": "not found"})
        if method == "PATCH":
            self.objects[path] = merged(self.objects[path], body)
            return 200, self.objects[path]
        return super().answer(method, path, query, body)

    def create(self, path, query, body):
        if "dryRun" in query:
            return super().create(path, query, body)
        status, answer = super().create(path, query | {"dryRun": ["All"]}, body)
        if status == 201:
            about = {"uid": f"{path}-{self.requests}", "creationTimestamp": "2026-01-01T00:00:00Z"} | body["metadata"]
            answer = self.objects[f"{path}/{body['metadata']['name']}"] = body | {"metadata": about}
        return status, answer

    def remove(self, path):
        gone = self.objects.pop(path)
        for other, one in list(self.objects.items()):
            if gone["metadata"].get("uid") in [owner["uid"] for owner in one["metadata"].get("ownerReferences", [])]:
                self.remove(other)
        return gone

    def log(self, pod, query):
        since = query.get("sinceTime", [""])[0]
        lines = (self.logs_before if "previous" in query else self.logs).get(pod, [])
        left = [line for line in lines if not since or moment(line.partition(" ")[0]) >= moment(since)]
        broken = bool(self.breaks) and "previous" not in query
        told = left[: self.breaks.pop(0)] if broken else left
        text = "".join((line if "timestamps" in query else line.partition(" ")[2]) + "\n" for line in told)
        return 200, (BrokenOff if broken else bytes)(text.encode())


def moment(stamp):
    """The second of an RFC 3339 time, in whatever zone."""
    zone = re.search(r"Z|[+-]\d\d:\d\d$", stamp)[0]
    return datetime.fromisoformat(stamp[:19] + zone.replace("Z", "+00:00"))


def merged(one, change):
    """RFC 7386's merge of two objects."""
    return one | {key: merged(one.get(key, {}), new) if isinstance(new, dict) else new for key, new in change.items()}


def forbidden(verb, resource):
    where = 'in API group "" in the namespace "team"'
    message = f'{resource} is forbidden: User "me" cannot {verb} resource "{resource}" {where}'
    return 403, {"message": message, "reason": "Forbidden"}


@contextmanager
def serve(world: World) -> Iterator[str]:
    """The world's address, while it answers there."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self):
            url = urlsplit(self.path)
            if url.path in world.dead:
                self.close_connection = True
                return
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = world.answer(self.command, url.path, parse_qs(url.query), body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.close_connection = isinstance(answer, BrokenOff)
            self.send_header("Content-Length", str(len(data) + self.close_connection))
            with suppress(ConnectionError):  # of a test that has ended
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = handle_one

        def log_message(self, *_):
            pass

    connected: list[socket.socket] = []

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def get_request(self):
            request = super().get_request()
            connected.append(request[0])
            return request

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
    # Connections that clients keep would be left for the tests that follow.
    for one in connected:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
