"""The one module that talks to a Kubernetes API server: plain JSON objects in and out, any kind, any version.

The official client reads the kubeconfig, authenticates (exec plugins and token refresh included) and verifies TLS. Its
generated models are not used: dry runs and custom resources need none.
"""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import yaml

from worldsize.errors import UserError
from worldsize.launch.answers import ClusterError, Unreachable, as_unreachable, first_line, refusal
from worldsize.launch.kinds import KINDS, Kind
from worldsize.launch.lastlines import LastLines

if TYPE_CHECKING:
    from worldsize.launch.exec import Session

Object = dict[str, Any]
Objects = list[Object]
Lines = list[str]

FIELD_MANAGER = "worldsize"
_CONNECT_S, _READ_S = 10.0, 30.0
_WATCH_S = 290  # the server ends the watch; we list again
_SETTLING_S = 0.5
_IDLE_S, _PROBE_S, _PROBES = 60, 15, 6  # of a connection on which nothing comes: asked whether the server is still there
_PATIENCE_S = 300.0  # with a server that does not answer, while something is being followed


class Cluster:
    """A Kubernetes cluster, as the user's kubeconfig names it.

    Args:
        context: of the kubeconfig; None: its current one. Inside a pod without a kubeconfig, the pod's service account.
        namespace: None: the context's.

    Raises:
        UserError: no usable kubeconfig, or the client is not installed.
    """

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        try:
            import kubernetes.client
            import kubernetes.config
        except ImportError:
            raise UserError("talking to a cluster needs the Kubernetes client: pip install 'worldsize[k8s]'") from None
        self._settings = kubernetes.client.Configuration()
        own_namespace = _load(kubernetes.config, self._settings, context)
        self.namespace = namespace or own_namespace
        self._given = (("--namespace", namespace), ("--context", context))
        # As many connections stay open as pods are followed at once.
        self._settings.connection_pool_maxsize = 128
        self._settings.socket_options = _keepalive()
        self._client = kubernetes.client.ApiClient(self._settings)

    @property
    def server(self) -> str:
        """The API server's address."""
        return str(self._settings.host)

    def command(self, *words: str) -> str:
        """A command of worldsize to type, for this cluster and namespace as they were named."""
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
        """The answer as JSON.

        Raises:
            ClusterError: the server's own message; `Unreachable` where there was no answer.
        """
        answer = self._send(method, path, query, body, content_type, timeout)
        try:
            return json.loads(answer.data)
        except ValueError:
            raise ClusterError(f"{self.server}{path} did not answer in JSON: is it an API server?") from None

    def stream(self, path: str, query: Mapping[str, Any], timeout: tuple[float, float | None]) -> Iterator[bytes]:
        """The answer line by line with its line ends, as it comes. An interrupted connection is an `Unreachable`."""
        answer = self._send("GET", path, query, None, "application/json", timeout, preload=False)
        with closing(answer), as_unreachable(self.server):
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
        with as_unreachable(self.server):
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
        """The headers that say who asks; fetched anew each time, for tokens run out."""
        settings: Any = self._settings.auth_settings()
        return {setting["key"]: setting["value"] for setting in settings.values()}

    # Objects ----------------------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object; None where there is none."""
        try:
            return dict(self.request("GET", KINDS[kind].path(namespace or self.namespace, name)))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, selector: str = "", fields: str = "", everywhere: bool = False) -> Objects:
        """All objects that the label ``selector`` and the field selector choose."""
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
        """Create the object; a `ClusterError` with status 409 where one of that name exists."""
        query = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
        path = self._path_of(manifest)
        return dict(self.request("POST", path, query, manifest))

    def patch(self, kind: str, name: str, change: Object) -> Object:
        """Merge ``change`` into the object."""
        path = KINDS[kind].path(self.namespace, name)
        query = {"fieldManager": FIELD_MANAGER}
        return dict(self.request("PATCH", path, query, change, "application/merge-patch+json"))

    def delete(self, kind: str, name: str) -> bool:
        """Delete the object and, in the background, what it owns. Returns whether there was one."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            self.request("DELETE", KINDS[kind].path(self.namespace, name), None, body)
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return True

    def allowed(self, verb: str, kind: str, subresource: str = "") -> bool:
        """Whether the user may do this in the namespace."""
        of = KINDS[kind]
        group = of.group_version.rpartition("/")[0]
        attributes: Object = {"verb": verb, "group": group, "resource": of.plural, "subresource": subresource}
        if of.namespaced:
            attributes["namespace"] = self.namespace
        review: Object = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        review["spec"] = {"resourceAttributes": attributes}
        answer = self.request("POST", KINDS["SelfSubjectAccessReview"].path(None), None, review)
        return bool(answer["status"]["allowed"])

    @cached_property
    def version(self) -> str:
        """Of the API server, such as v1.34.1."""
        return str(self.request("GET", "/version")["gitVersion"])

    def serves(self, kind: str) -> bool:
        """Whether the API server knows this kind in this version."""
        of = KINDS[kind]
        try:
            found = self.request("GET", of.root)
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == of.plural for resource in found["resources"])

    def _path_of(self, manifest: Object) -> str:
        """Of all objects of its kind in its namespace."""
        metadata = manifest["metadata"]
        kind = KINDS[manifest["kind"]]
        if manifest["apiVersion"] != kind.group_version:
            raise ValueError(f"{manifest['kind']} of {manifest['apiVersion']}: only {kind.group_version} is known")
        return kind.path(metadata.get("namespace", self.namespace))

    # Following --------------------------------------------------------------------------------------------------------

    def watch(self, kind: str, selector: str = "", fields: str = "", stop: Callable[[], bool] = bool) -> Iterator[Objects]:
        """All objects that are chosen, anew after every change, until ``stop()``.

        The watch may end, expire (410) or lose the server for up to five minutes: then everything is listed again.

        Raises:
            ClusterError: the server refuses, or stays away.
        """
        of = KINDS[kind]
        lost: float | None = None
        while not stop():
            try:
                items, version = self._list(of, selector, fields)
                lost = None
                known = {item["metadata"]["uid"]: item for item in items}
                yield list(known.values())
                query = {"labelSelector": selector, "fieldSelector": fields, "watch": "true", "resourceVersion": version}
                query |= {"timeoutSeconds": str(_WATCH_S), "allowWatchBookmarks": "true"}
                for line in self.stream(of.path(self.namespace), query, (_CONNECT_S, _WATCH_S + 30)):
                    if _changed(known, json.loads(line)):
                        yield list(known.values())
                    if stop():
                        return
            except ClusterError as error:
                if error.status != 410:
                    lost = _bear(error, lost)

    def logs(self, pod: str, container: str, stop: Callable[[], bool] = bool) -> Iterator[str]:
        """Every line that the container writes, once and in order, until it has ended or ``stop()``.

        Where the connection breaks, reading goes on after the last line seen.
        """
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/log"
        seen = LastLines()
        lost: float | None = None
        ended, rest = False, b""
        while not stop():
            query = {"container": container, "follow": "true", "timestamps": "true"} | seen.since
            fresh, before, rest = False, rest, b""
            try:
                for line in self.stream(path, query, (_CONNECT_S, None)):
                    lost = None
                    if not line.endswith(b"\n"):
                        rest = line
                    elif (text := seen.new(_decoded(line))) is not None:
                        fresh = True
                        yield text
            except ClusterError as error:
                if error.status == 404:
                    return
                lost = _bear(error, lost)
                continue
            if ended and not fresh:
                if (text := seen.last(_decoded(rest), _decoded(before))) is not None:
                    yield text
                return
            # A server that shuts down ends the stream as if the container had: ask once more.
            ended = True
            time.sleep(_SETTLING_S)

    def previous_log(self, pod: str, container: str, tail: int) -> Lines:
        """The last lines of the container's run before this one; empty where there was none."""
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/log"
        query = {"container": container, "previous": "true", "tailLines": tail}
        try:
            return [_decoded(line) for line in self.stream(path, query, (_CONNECT_S, _READ_S))]
        except ClusterError:
            return []

    def exec(self, pod: str, container: str, command: Sequence[str]) -> Session:
        """Start ``command`` in the container. The caller talks to it and closes it."""
        from kubernetes.stream.ws_client import create_websocket

        from worldsize.launch.exec import PROTOCOL, Session

        streams = {"stdin": "true", "stdout": "true", "stderr": "true"}
        query = urlencode({"container": container, "command": list(command)} | streams, doseq=True)
        url = f"ws{self.server.removeprefix('http')}{KINDS['Pod'].path(self.namespace, pod)}/exec?{query}"
        headers = {"sec-websocket-protocol": PROTOCOL} | self._credentials()
        return Session(lambda: create_websocket(self._settings, url, headers))


def _keepalive() -> list[tuple[int, int, int]]:
    """Socket options by which a server that is gone is noticed: a log may say nothing for days, and has no timeout."""
    from urllib3.connection import HTTPConnection

    # Each platform has some of them; macOS calls the first by another name.
    wanted = {"TCP_KEEPIDLE": _IDLE_S, "TCP_KEEPALIVE": _IDLE_S, "TCP_KEEPINTVL": _PROBE_S, "TCP_KEEPCNT": _PROBES}
    own = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]
    return [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *own]


def _decoded(line: bytes) -> str:
    return line.decode("utf-8", "replace").removesuffix("\n")


def _changed(known: dict[str, Object], event: Object) -> bool:
    """Take a watch event in. Returns whether anything changed."""
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


def _bear(error: ClusterError, lost: float | None) -> float:
    """Wait a second for a server that is away or overloaded; raise what waiting does not mend. Returns since when."""
    now = time.monotonic()
    if not isinstance(error, Unreachable) and error.status not in (429, 500, 502, 503, 504):
        raise error
    if lost is not None and now - lost > _PATIENCE_S:
        raise error
    time.sleep(1.0)
    return now if lost is None else lost


def _load(config: Any, settings: Any, context: str | None) -> str:
    """Read the kubeconfig into ``settings``. Returns the namespace it names."""
    try:
        all_of_them, active = config.list_kube_config_contexts()
        contexts = {entry["name"]: entry for entry in all_of_them}
        chosen = contexts.get(context) if context else active
        if chosen is None:
            raise UserError(f"the kubeconfig has no context {context!r}; it has: {', '.join(sorted(contexts))}")
        config.load_kube_config(context=context, client_configuration=settings)
        return str(chosen["context"].get("namespace", "default"))
    except (config.ConfigException, OSError, yaml.YAMLError, KeyError, TypeError) as error:
        if context is None:
            with suppress(config.ConfigException, OSError):
                config.load_incluster_config(client_configuration=settings)
                with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
                    return file.read().strip()
        raise UserError(
            f"no usable kubeconfig ({first_line(error)}): set KUBECONFIG to its file, or ask whoever runs the cluster"
        ) from None
