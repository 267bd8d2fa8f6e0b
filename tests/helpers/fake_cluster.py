"""A fake cluster: a minimal API server, for clusters that the test machine cannot provide.

It contains the objects that a test adds. It has no operators, so created objects do not change.
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
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from servers import TestServer
from worldsize.cluster.kinds import KINDS
from worldsize.cluster.manifests.pod import training_labels
from worldsize.cluster.objects import labels


def node(name="n0", labels=(), taints=(), **allocatable):
    amounts = {"cpu": "8", "memory": "32Gi", "pods": "110"} | allocatable
    return {
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {"taints": list(taints)},
        "status": {"allocatable": {key.replace("__", "/"): amount for key, amount in amounts.items()}},
    }


def gpu_node(name, gpus, **options):
    with_gpus = node(name, **options)
    with_gpus["status"]["allocatable"]["nvidia.com/gpu"] = str(gpus)
    return with_gpus


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


def is_in(fake_cluster, kind, phase=None, name="r50", **metadata):
    """Add a worldsize job in this phase."""
    conditions = [{"type": phase, "status": "True", "message": f"it is {phase}"}] if phase else []
    fake_cluster.add(kind, name, metadata={"labels": labels(name)} | metadata, status={"conditions": conditions})


CRDS = {
    "kubeflow.org/v1": ["pytorchjobs"],
    "kubeflow.org/v2beta1": ["mpijobs"],
    "trainer.kubeflow.org/v1alpha1": ["trainjobs", "trainingruntimes", "clustertrainingruntimes"],
    "jobset.x-k8s.io/v1alpha2": ["jobsets"],
}
PLURALS = {kind.plural: kind for kind in KINDS.values()}


class FakeCluster:
    """The state of the fake cluster: objects by URL, denied permissions, and admission errors."""

    def __init__(self):
        self.objects = {}
        self.served = {version: list(plurals) for version, plurals in CRDS.items()}
        self.trainjob_fields = ["runtimeRef", "trainer", "runtimePatches"]
        self.version = "v1.34.10"
        self.denied = set()  # (verb, resource)
        self.dead = set()  # paths for which the connection is closed
        self.refusals = {}
        self.admit = lambda pod: None  # changes pods, as admission controllers do
        self.requests = 0
        self.add("Namespace", "team")
        self.add("Node", **gpu_node("n0", 8))
        self.add("Node", **gpu_node("n1", 8))
        self.volume("data", "ReadWriteMany")

    def add(self, kind, name=None, /, **body):
        metadata = {"name": name, "namespace": "team"} | body.pop("metadata", {})
        self.objects[KINDS[kind].path(metadata["namespace"], metadata["name"])] = {"metadata": metadata, **body}

    def refuse(self, kind, status, message):
        """Reject new objects of this kind with this error."""
        self.refusals[kind] = (status, message)

    def volume(self, name, *modes, phase="Bound", **spec):
        self.add("PersistentVolumeClaim", name, spec={"accessModes": list(modes), **spec}, status={"phase": phase})

    def answer(self, method, path, query, body):
        self.requests += 1
        if path == "/version":
            return 200, {"gitVersion": self.version}
        if body and body["kind"] == "SelfSubjectAccessReview":
            attributes = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (attributes["resource"], attributes["subresource"])))
            return 201, {"status": {"allowed": (attributes["verb"], resource) not in self.denied}}
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
        assert query["dryRun"] == ["All"], "preflight must not change anything"
        assert query["fieldValidation"] == ["Strict"], "a server drops unknown fields"
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
        if body["kind"] == "Pod":
            self.admit(body)
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
    """The first part of a response whose connection is lost."""


class KeepingCluster(FakeCluster):
    """A fake cluster that applies changes; deleting an object also deletes the objects it owns. Its pods have logs."""

    def __init__(self):
        super().__init__()
        self.logs = {}  # by pod: lines with timestamps
        self.logs_before = {}  # by pod: the same for the container's previous run
        self.breaks = []  # for successive responses: after how many lines the connection is lost
        self.ends = []  # the same: after how many lines the response ends, as a proxy ends it

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
            metadata = {"uid": f"{path}-{self.requests}", "creationTimestamp": "2026-01-01T00:00:00Z"} | body["metadata"]
            answer = self.objects[f"{path}/{body['metadata']['name']}"] = body | {"metadata": metadata}
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
        if self.ends:
            left = left[: self.ends.pop(0)]
        broken = bool(self.breaks) and "previous" not in query
        sent = left[: self.breaks.pop(0)] if broken else left
        text = "".join((line if "timestamps" in query else line.partition(" ")[2]) + "\n" for line in sent)
        return 200, (BrokenOff if broken else bytes)(text.encode())


def moment(stamp):
    """An RFC 3339 time in any zone, without the fraction of a second."""
    zone = re.search(r"Z|[+-]\d\d:\d\d$", stamp)[0]
    return datetime.fromisoformat(stamp[:19] + zone.replace("Z", "+00:00"))


def merged(one, change):
    """The JSON merge patch of RFC 7386."""
    return one | {key: merged(one.get(key, {}), new) if isinstance(new, dict) else new for key, new in change.items()}


def forbidden(verb, resource):
    where = 'in API group "" in the namespace "team"'
    message = f'{resource} is forbidden: User "me" cannot {verb} resource "{resource}" {where}'
    return 403, {"message": message, "reason": "Forbidden"}


@contextmanager
def serve(fake_cluster: FakeCluster) -> Iterator[str]:
    """Serve the fake cluster over HTTP. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are two packets: the second would wait 40 ms

        def handle_one(self):
            url = urlsplit(self.path)
            if url.path in fake_cluster.dead:
                self.close_connection = True
                return
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = fake_cluster.answer(self.command, url.path, parse_qs(url.query), body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.close_connection = isinstance(answer, BrokenOff)
            self.send_header("Content-Length", str(len(data) + self.close_connection))
            with suppress(ConnectionError):  # if the test has already ended
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = handle_one

        def log_message(self, *_):
            pass

    connected: list[socket.socket] = []

    class Server(TestServer):
        request_queue_size = 128

        def get_request(self):
            request = super().get_request()
            connected.append(request[0])
            return request

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
    # Connections that clients keep open would otherwise remain during the following tests.
    for one in connected:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
