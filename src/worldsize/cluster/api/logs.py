"""Reads one container's log to its end, across lost connections and streams that end early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from worldsize.cluster.api.errors import ClusterError, wait_for_server
from worldsize.cluster.api.log_cursor import LogCursor
from worldsize.cluster.objects import Object

_SETTLING_S, _LONGEST_PAUSE_S = 0.5, 5.0


class Run(NamedTuple):
    """One run of a container: it ends when the container ends, is restarted in place, or its pod is removed."""

    pod_uid: str
    restarts: int


Request = Callable[[Mapping[str, str]], Iterator[bytes]]  # query parameters -> the response, line by line
Look = Callable[[], Object | None]  # the pod; None: it does not exist


def follow(request: Request, look: Look, container: str, run: Run | None, stop: Callable[[], bool]) -> Iterator[str]:
    """Yield every line of the run's log, once and in order, until the run has ended or ``stop()``.

    A stream may end although the container runs: proxies close connections on which nothing arrives for minutes, and a
    server that shuts down ends the stream, too. So only the pod's status says whether the log is complete.

    Args:
        run: None: the container's current run.

    Raises:
        ClusterError: the server rejects a request, or is down for more than five minutes.
    """
    cursor, pause = LogCursor(), _SETTLING_S
    lost_since: float | None = None
    over, rest = "", b""
    while not stop():
        fresh, before, rest = False, rest, b""
        refusal: ClusterError | None = None
        try:
            for line in request(_query(container, over) | cursor.since):
                lost_since, pause = None, _SETTLING_S
                if not line.endswith(b"\n"):
                    rest = line
                elif (text := cursor.new(decoded(line))) is not None:
                    fresh = True
                    yield text
            complete, lost_since = bool(over) and not fresh, None
        except ClusterError as error:
            # A kubelet that has just started does not know its pods yet, so only the pod's status shows which are gone. A
            # restarted container's previous log may be removed at any time. A pod of the same name, which replaces this
            # one, has no log before it starts.
            missing, refusal = error.status in (400, 404), error if error.status == 400 else None
            if missing and over:
                return
            complete, lost_since = False, None if missing else wait_for_server(error, lost_since)
        if not over:
            try:
                pod = look()
            except ClusterError as error:
                lost_since = wait_for_server(error, lost_since)
                continue
            run = run or _current(pod, container)
            over = _end(pod, container, run)
            if refusal is not None and over not in ("removed", "restarted"):
                raise refusal
        if complete or over == "removed":
            if (text := cursor.last(decoded(rest), decoded(before))) is not None:
                yield text
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def decoded(line: bytes) -> str:
    """The line as text, without its line end."""
    return line.decode("utf-8", "replace").removesuffix("\n")


def _query(container: str, over: str) -> dict[str, str]:
    which = "previous" if over == "restarted" else "follow"
    return {"container": container, "timestamps": "true", which: "true"}


def _status(pod: Object | None, container: str) -> Object:
    statuses = pod["status"].get("containerStatuses", []) if pod else []
    return next((dict(status) for status in statuses if status["name"] == container), {})


def _current(pod: Object | None, container: str) -> Run | None:
    return Run(pod["metadata"]["uid"], _status(pod, container).get("restartCount", 0)) if pod else None


def _end(pod: Object | None, container: str, run: Run | None) -> str:
    """How the run ended: "removed" with its pod, "restarted" in place, or just "ended"; empty if it has not."""
    if pod is None or run is None or pod["metadata"]["uid"] != run.pod_uid:
        return "removed"
    status = _status(pod, container)
    if status.get("restartCount", 0) > run.restarts:
        return "restarted"
    # The status of a pod on a lost node may have a running container for good.
    return "" if "running" in status.get("state", {}) and pod["status"].get("phase") == "Running" else "ended"
