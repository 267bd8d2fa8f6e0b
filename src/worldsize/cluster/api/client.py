"""The client for the Kubernetes API server: plain JSON objects in and out, any kind, any version.

The official client reads the kubeconfig, authenticates (including exec plugins and token refresh) and verifies TLS. Its
generated models are not used: dry runs and custom resources do not need them. Nor is its `Watch`: it ends a log with its
connection, and does not list objects again after an outage, so that deletions would be missed.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from worldsize.cluster.api import kubeconfig, logs
from worldsize.cluster.api.errors import ClusterError, connection_errors, refusal, wait_for_server
from worldsize.cluster.kinds import KINDS, Kind, header
from worldsize.cluster.manifests import syntax
from worldsize.cluster.objects import Object
from worldsize.errors import UserError

if TYPE_CHECKING:
    from worldsize.cluster.api.exec import Session

Objects = list[Object]
Lines = list[str]

FIELD_MANAGER = "worldsize"
_CONNECT_S, _READ_S = 10.0, 30.0
_MOMENT_S = 5.0  # an outage that takes longer is reported
_WATCH_S = 290  # the server ends the watch, and we list again
_IDLE_S, _PROBE_S, _PROBES = 60, 15, 6  # TCP keepalive


class Cluster:
    """A Kubernetes cluster from the user's kubeconfig.

    Args:
        context: kubeconfig context; None: the current one, or the pod's service account in a pod without a kubeconfig.
        namespace: None: the namespace of the context.

    Raises:
        UserError: no usable kubeconfig, or the Kubernetes client is not installed.
    """

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        for option, value in (("--context", context), ("--namespace", namespace)):
            if value is not None and not value.strip():
                raise UserError(f"{option} is empty; is the shell variable set?")
        if namespace is not None and not syntax.is_label(namespace):
            raise UserError(f"--namespace {namespace!r}: use at most 63 lowercase letters, digits and '-'")
        try:
            import kubernetes.client
            import kubernetes.config
        except ImportError:
            raise UserError("cluster commands require the Kubernetes client: pip install 'worldsize[k8s]'") from None
        self._settings = kubernetes.client.Configuration()
        own_namespace = kubeconfig.load(kubernetes.config, self._settings, context)
        self.namespace = namespace or own_namespace
        self._given = (("--namespace", namespace), ("--context", context))
        # Each followed pod keeps a connection open.
        self._settings.connection_pool_maxsize = 128
        self._settings.socket_options = _keepalive()
        self._client = kubernetes.client.ApiClient(self._settings)

    @property
    def server(self) -> str:
        """The API server's address."""
        return str(self._settings.host)

    def command(self, *words: str) -> str:
        """A worldsize command line for this cluster and namespace, with the options that the user passed."""
        given = [word for option, value in self._given if value for word in (option, value)]
        return shlex.join(["worldsize", *words, *given])

    # Requests ---------------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout: tuple[float, float | None] = (_CONNECT_S, _READ_S),
    ) -> Any:
        """The response as JSON.

        Raises:
            ClusterError: the request failed; has the server's message. `Unreachable` if there was no response.
        """
        answer = self._send(method, path, query, body, content_type, timeout)
        try:
            return json.loads(answer.data)
        except ValueError:
            raise ClusterError(
                f"{self.server}{path} did not return JSON; check that this is a Kubernetes API server"
            ) from None

    def stream(self, path: str, query: Mapping[str, Any], timeout: tuple[float, float | None]) -> Iterator[bytes]:
        """Yield the response line by line, including line ends, as it arrives. A lost connection raises `Unreachable`."""
        answer = self._send("GET", path, query, None, "application/json", timeout, preload=False)
        with closing(answer), connection_errors(self.server):
            left = b""
            for chunk in answer.stream(1 << 16, decode_content=False):
                *lines, left = (left + chunk).split(b"\n")
                for line in lines:
                    yield line + b"\n"
            if left:
                yield left

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Any,
        content_type: str,
        timeout: tuple[float, float | None],
        preload: bool = True,
    ) -> Any:
        import urllib3

        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": FIELD_MANAGER}
        headers |= self._credentials()
        url = self.server + path + (f"?{urlencode(query)}" if query else "")
        with connection_errors(self.server):
            answer = self._client.rest_client.pool_manager.request(
                method,
                url,
                headers=headers,
                body=None if body is None else json.dumps(body).encode(),
                timeout=urllib3.Timeout(connect=timeout[0], read=timeout[1]),
                retries=False,
                preload_content=preload,
            )
            if answer.status >= 400:
                raise refusal(method, path, answer.status, answer.data)
        return answer

    def _credentials(self) -> dict[str, str]:
        """The authentication headers; fetched for each request, because tokens expire."""
        settings: Any = self._settings.auth_settings()
        return {setting["key"]: setting["value"] for setting in settings.values()}

    # Objects ----------------------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object; None if it does not exist."""
        try:
            return dict(self.request("GET", KINDS[kind].path(namespace or self.namespace, name)))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, selector: str = "", fields: str = "", everywhere: bool = False) -> Objects:
        """All objects that match the label ``selector`` and the field selector ``fields``."""
        return self._list(KINDS[kind], selector, fields, everywhere)[0]

    def _list(self, kind: Kind, selector: str, fields: str, everywhere: bool = False) -> tuple[Objects, str]:
        query: dict[str, Any] = {"labelSelector": selector, "fieldSelector": fields, "limit": 500}
        items: Objects = []
        while True:
            page = self.request("GET", kind.path(None if everywhere else self.namespace), query)
            items += page["items"]
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return items, page["metadata"]["resourceVersion"]

    def create(self, manifest: Object, dry_run: bool = False) -> Object:
        """Create the object. Raises `ClusterError` with status 409 if the name already exists."""
        # Without Strict, a server drops fields that it does not know.
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        path = self._path_of(manifest)
        return dict(self.request("POST", path, query, manifest))

    def patch(self, kind: str, name: str, change: Object) -> Object:
        """Merge ``change`` into the object."""
        path = KINDS[kind].path(self.namespace, name)
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return dict(self.request("PATCH", path, query, change, "application/merge-patch+json"))

    def delete(self, kind: str, name: str) -> bool:
        """Delete the object and, in the background, the objects that it owns. Returns whether it existed."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            self.request("DELETE", KINDS[kind].path(self.namespace, name), None, body)
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return True

    def allowed(self, verb: str, kind: str, subresource: str = "") -> bool:
        """Whether the user has this permission in the namespace."""
        resource = KINDS[kind]
        attributes: Object = {"verb": verb, "group": resource.group, "resource": resource.plural, "subresource": subresource}
        if resource.namespaced:
            attributes["namespace"] = self.namespace
        review: Object = {**header("SelfSubjectAccessReview")}
        review["spec"] = {"resourceAttributes": attributes}
        answer = self.request("POST", KINDS["SelfSubjectAccessReview"].path(None), None, review)
        return bool(answer["status"]["allowed"])

    @cached_property
    def version(self) -> str:
        """Version of the API server, such as v1.34.1."""
        return str(self.request("GET", "/version")["gitVersion"])

    def serves(self, kind: str) -> bool:
        """Whether the API server serves this kind in the version that we use."""
        target = KINDS[kind]
        try:
            found = self.request("GET", target.root)
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == target.plural for resource in found["resources"])

    def _path_of(self, manifest: Object) -> str:
        """URL path of all objects of the manifest's kind in its namespace."""
        metadata = manifest["metadata"]
        kind = KINDS[manifest["kind"]]
        if manifest["apiVersion"] != kind.group_version:
            raise ValueError(f"{manifest['kind']} {manifest['apiVersion']}: only {kind.group_version} is supported")
        return kind.path(metadata.get("namespace", self.namespace))

    # Following --------------------------------------------------------------------------------------------------------

    def watch(
        self,
        kind: str,
        selector: str = "",
        fields: str = "",
        stop: Callable[[], bool] = bool,
        outage: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Objects]:
        """Yield all matching objects, again after every change, until ``stop()``.

        When the watch ends or expires (410), or after a server outage of up to five minutes, all objects are listed again.

        Args:
            outage: called once for each outage that takes longer than a moment, and once for its end.

        Raises:
            ClusterError: the server rejects the request, or is down for longer.
        """
        watched = KINDS[kind]
        lost_since: float | None = None
        reported = False
        while not stop():
            try:
                items, version = self._list(watched, selector, fields)
                if reported:
                    outage("the API server responds again")
                lost_since, reported = None, False
                known = {item["metadata"]["uid"]: item for item in items}
                yield list(known.values())
                query = {"labelSelector": selector, "fieldSelector": fields, "watch": "true", "resourceVersion": version}
                query |= {"timeoutSeconds": str(_WATCH_S), "allowWatchBookmarks": "true"}
                for line in self.stream(watched.path(self.namespace), query, (_CONNECT_S, _WATCH_S + 30)):
                    if _apply(known, json.loads(line)):
                        yield list(known.values())
                    if stop():
                        return
            except ClusterError as error:
                if error.status != 410:
                    lost_since = wait_for_server(error, lost_since)
                    if not reported and time.monotonic() - lost_since > _MOMENT_S:
                        reported = True
                        outage(f"{error}; trying again for up to 5 minutes")

    def logs(self, pod: str, container: str, run: logs.Run | None = None, stop: Callable[[], bool] = bool) -> Iterator[str]:
        """Yield every line of the log of one ``run`` of the container, see `logs.follow`."""
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/log"

        def look() -> Object | None:
            # Following requires the permission to list pods, not to get them.
            return next(iter(self.list("Pod", fields=f"metadata.name={pod}")), None)

        return logs.follow(lambda query: self.stream(path, query, (_CONNECT_S, None)), look, container, run, stop)

    def previous_log(self, pod: str, container: str, tail: int) -> Lines:
        """The last lines of the container's previous run; empty if there was none."""
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/log"
        query = {"container": container, "previous": "true", "tailLines": tail}
        try:
            return [logs.decoded(line) for line in self.stream(path, query, (_CONNECT_S, _READ_S))]
        except ClusterError:
            return []

    def exec(self, pod: str, container: str, command: Sequence[str]) -> Session:
        """Start ``command`` in the container. The caller must close the session."""
        from kubernetes.stream.ws_client import create_websocket

        from worldsize.cluster.api.exec import PROTOCOL, Session

        streams = {"stdin": "true", "stdout": "true", "stderr": "true"}
        query = urlencode({"container": container, "command": list(command)} | streams, doseq=True)
        url = f"ws{self.server.removeprefix('http')}{KINDS['Pod'].path(self.namespace, pod)}/exec?{query}"
        headers = {"sec-websocket-protocol": PROTOCOL} | self._credentials()
        return Session(lambda: create_websocket(self._settings, url, headers))


def _keepalive() -> list[tuple[int, int, int]]:
    """Socket options that detect a lost server: a log may be silent for days and has no read timeout."""
    from urllib3.connection import HTTPConnection

    # Each platform has a subset; macOS has TCP_KEEPALIVE instead of TCP_KEEPIDLE.
    values = {"TCP_KEEPIDLE": _IDLE_S, "TCP_KEEPALIVE": _IDLE_S, "TCP_KEEPINTVL": _PROBE_S, "TCP_KEEPCNT": _PROBES}
    tcp = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in values.items() if hasattr(socket, name)]
    return [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *tcp]


def _apply(known: dict[str, Object], event: Object) -> bool:
    """Apply a watch event to the ``known`` objects, by UID. Returns whether anything changed."""
    kind, item = event["type"], event["object"]
    if kind == "BOOKMARK":
        return False
    if kind == "ERROR":
        raise ClusterError(item.get("message", "the watch failed"), item.get("code", 0), item.get("reason", ""))
    uid = item["metadata"]["uid"]
    if kind == "DELETED":
        known.pop(uid, None)
    else:
        known[uid] = item
    return True
