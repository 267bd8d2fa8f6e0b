"""Follows a job until it ends: its state, why it is waiting, and the output of all ranks, as one stream of events."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError, Unauthenticated
from worldsize.cluster.api.logs import Run
from worldsize.cluster.jobs import diagnose
from worldsize.cluster.manifests.base import Target
from worldsize.cluster.manifests.pod import ENDED, queue_of
from worldsize.cluster.objects import Object
from worldsize.jobs.state import JobState, Line, Note

_MPI_TAG = re.compile(r"(?=\[1,\d+\]<std(?:out|err)>:)")
# Log lines with a rank, from worldsize's agent and from mpirun --tag-output.
_RANKED = re.compile(r"\[(?:1,)?(\d+)\](?:<std(?:out|err)>:)? ?(.*)", re.DOTALL)
_DRAIN_S = 15.0  # without a further line, after the job has ended
_SILENCE_S = 30.0  # without pods and without warnings
_SETBACK_S = 45.0  # for an operator's retries to succeed
_BUFFERED = 20_000  # lines between the reader threads and the consumer


@dataclass
class _Observed:
    """What is known about the job so far."""

    job: Object | None = None
    pods: list[Object] = field(default_factory=list)
    events: list[Object] = field(default_factory=list)
    workloads: list[Object] | None = None
    job_loaded: bool = False
    pods_listed: bool = False
    announced: set[str] = field(default_factory=set)
    announced_by_queue: set[str] = field(default_factory=set)
    headline: str = ""
    headline_at: float = 0.0
    left_created: bool = False
    abandoned: bool = False
    setback_at: float | None = None


class Follower:
    """Follows one job of a cluster. Threads read from the server; `events` merges what they read.

    Args:
        logs: whether to read the pods' logs.
    """

    def __init__(self, cluster: Cluster, target: Target, name: str, logs: bool = True) -> None:
        self._cluster = cluster
        self._target = target
        self._name = name
        self._logs = logs
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(_BUFFERED)
        self._seen = _Observed()
        self._reading: dict[Run, threading.Thread] = {}
        self._stopped = threading.Event()
        self.state = JobState("Created")

    def failures(self) -> list[str]:
        """The failed containers and pods, see `diagnose.failures`."""
        return diagnose.failures(self._target, self._seen.pods)

    def events(self) -> Iterator[Line | Note | None]:
        """Everything that happens until the job has ended or is stopped; then `state` is final.

        Yields None at least twice a second.
        """
        watch, name = self._cluster.watch, self._name
        stop, fields = self._stopped.is_set, f"metadata.name={name}"
        self._feed(
            "job", lambda: watch(self._target.kind, fields=fields, stop=stop, outage=lambda text: self._put("note", text))
        )
        self._feed("pods", lambda: watch("Pod", self._target.selector(name), stop=stop))
        self._feed("events", self._events)
        drain_since: float | None = None
        try:
            while True:
                try:
                    what, value = self._queue.get(timeout=0.5)
                except queue.Empty:
                    yield None
                else:
                    yield from self._handle(what, value)
                    if what == "line":
                        drain_since = None  # the consumer may have been slow
                    # Irrelevant changes may arrive without a pause: in a busy namespace, events of other jobs.
                    yield None
                yield from self._silence()
                if self._setback_expired() and not self.state.ended:
                    yield from self._news()
                if self._over():
                    drain_since = drain_since or time.monotonic()
                    if self._drained() or self._seen.abandoned:
                        return
                    if time.monotonic() - drain_since > _DRAIN_S:
                        if self._still_reading():
                            yield Note(
                                f"no log line for {_DRAIN_S:.0f} s, and some logs have not ended: lines may be missing"
                            )
                        return
        finally:
            self._stopped.set()

    def _feed(self, what: str, source: Callable[[], Iterator[Any]]) -> threading.Thread:
        """Put everything that ``source`` yields, and a failure of it, into the queue from a thread."""

        def work() -> None:
            try:
                for value in source():
                    self._put(what, value)
                    if self._stopped.is_set():
                        return
            except Exception as error:
                # Losing one pod's log must not end following.
                self._put(*(("lost", error) if what == "line" else ("error", error)))

        thread = threading.Thread(target=work, name=f"follow {what}", daemon=True)
        thread.start()
        return thread

    def _put(self, what: str, value: Any) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put((what, value), timeout=1.0)
                return
            except queue.Full:
                continue

    def _handle(self, what: str, value: Any) -> Iterator[Line | Note]:
        if what == "line":
            yield value
        elif what == "note":
            yield Note(value)
        elif what == "lost":
            yield Note(f"cannot read a pod's log: {value}")
        elif what == "error":
            raise value
        elif what == "job":
            self._seen.job = value[0] if value else None
            self._seen.job_loaded = True
            yield from self._news()
            self._watch_workloads()
        elif what == "pods":
            self._seen.pods, self._seen.pods_listed = value, True
            for pod in value:
                self._read(pod)
            yield from self._news()
        elif what == "workloads":
            self._seen.workloads = value
            yield from self._news()
        else:
            self._seen.events = value
            yield from self._news()

    def _news(self) -> Iterator[Note]:
        """What is new about the job's state, as notes."""
        seen, target = self._seen, self._target
        if seen.job is None:
            if seen.job_loaded and not self.state.ended:
                self.state = JobState("Failed", "the job was deleted")
                yield Note("the job was deleted")
            return
        self.state = target.state(seen.job, seen.pods)
        seen.left_created |= self.state.phase not in ("Created", "Suspended")
        for reason, message, key in diagnose.warnings(target, seen.events, seen.job):
            if self._is_final(reason):
                seen.abandoned = True  # by us: its pods may keep running
                self.state = JobState("Failed", f"{reason}: {message}")
            if key not in seen.announced:
                seen.announced.add(key)
                yield Note(f"{reason}: {message}")
        headline = self._headline()
        if headline != seen.headline:
            seen.headline, seen.headline_at = headline, time.monotonic()
            yield Note(headline)
        if not self.state.ended:
            if self.state.phase != "Suspended":
                yield from self._losses()
            yield from _new(diagnose.waiting(target, seen.pods), seen.announced)
        if self._queue_name():
            yield from _new(diagnose.queued(seen.workloads or [], seen.job), seen.announced_by_queue)

    def _losses(self) -> Iterator[Note]:
        """Each failure of a pod, once: while others replace the pods, the job does not end, and nothing else shows why."""
        for text, key in diagnose.losses(self._target, self._seen.pods):
            if key not in self._seen.announced:
                self._seen.announced.add(key)
                yield Note(text)

    def _is_final(self, reason: str) -> bool:
        """Whether a warning with this reason means that the job will never start."""
        if reason in self._target.setbacks:
            self._seen.setback_at = self._seen.setback_at or time.monotonic()
            return self._setback_expired()
        return reason in self._target.dead_ends and self.state.phase in ("Created", "Pending") and not self._started()

    def _setback_expired(self) -> bool:
        """Whether an operator's retries had their time, and the operator has never updated the job's state since."""
        seen = self._seen
        untouched = self.state.phase == "Created" and not seen.left_created
        return untouched and seen.setback_at is not None and time.monotonic() - seen.setback_at > _SETBACK_S

    def _silence(self) -> Iterator[Note]:
        """Report a job without pods and events: nothing else shows that its operator is down or has silently given up."""
        seen = self._seen
        quiet = seen.job is not None and seen.pods_listed and not seen.pods and not seen.announced
        late = time.monotonic() - seen.headline_at > _SILENCE_S
        if self.state.phase in ("Created", "Pending") and quiet and late:
            text = f"{self._target.kind} {self._name}: no pods created and no events; check the operator's logs"
            seen.announced.add(text)
            yield Note(text)

    def _headline(self) -> str:
        pods, state = self._seen.pods, self.state
        started = self._started()
        waiting = state.phase != "Created" and not state.ended and started < len(pods)
        count = f", {started} of {len(pods)} pods started" if waiting else ""
        queue = self._queue_name()
        place = f" in Kueue queue {queue}" + (f": {state.reason}" if state.reason else "") if queue else ""
        return f"{self._target.kind} {self._name}: {state.phase}{count}{place}"

    def _queue_name(self) -> str | None:
        """The Kueue queue in which the job is waiting."""
        job = self._seen.job
        return queue_of(job) if job is not None and self.state.phase == "Suspended" else None

    def _watch_workloads(self) -> None:
        """Start to watch Kueue's workloads if the job is waiting in a queue."""
        seen = self._seen
        if seen.workloads is not None or self._queue_name() is None:
            return
        seen.workloads = []

        def workloads() -> Iterator[list[Object]]:
            # Optional: permissions may be missing, or Kueue may have another API version.
            with suppress(ClusterError):
                yield from self._cluster.watch("Workload", stop=self._stopped.is_set)

        self._feed("workloads", workloads)

    def _events(self) -> Iterator[list[Object]]:
        """Events explain what happens; following works without the permission to read them."""
        try:
            yield from self._cluster.watch("Event", stop=self._stopped.is_set)
        except ClusterError as error:
            if error.status != 403 or isinstance(error, Unauthenticated):
                raise
            self._put("note", f"reasons for waiting may be missing, because you have no permission to read events: {error}")

    def _started(self) -> int:
        return sum(pod["status"].get("phase") != "Pending" for pod in self._seen.pods)

    def _read(self, pod: Object) -> None:
        """Start to read the pod's log once it has one, and again after its container was restarted in place."""
        if not self._logs:
            return
        name, uid, place = pod["metadata"]["name"], pod["metadata"]["uid"], self._target.place(pod)[1]
        for status in pod["status"].get("containerStatuses", []):
            state = status.get("state", {})
            started = "running" in state or "terminated" in state
            key = Run(uid, status.get("restartCount", 0))
            if status["name"] != self._target.container or not started or key in self._reading:
                continue
            missed = key[1] > 0 and (uid, key[1] - 1) not in self._reading
            self._reading[key] = self._feed("line", lambda missed=missed, key=key: self._lines(name, place, key, missed))  # type: ignore[misc]

    def _lines(self, pod: str, place: str, run: Run, missed: bool) -> Iterator[Line]:
        if missed:
            for text in self._cluster.previous_log(pod, self._target.container, tail=20):
                yield from _lines_of(place, text)
        for text in self._cluster.logs(pod, self._target.container, run, self._stopped.is_set):
            yield from _lines_of(place, text)

    def _over(self) -> bool:
        """Whether the job has ended, or was stopped and its pods have ended. In a queue it only waits."""
        stopped = self.state.phase == "Suspended" and self._queue_name() is None and self._seen.pods_listed
        return self.state.ended or (stopped and all(pod["status"].get("phase") in ENDED for pod in self._seen.pods))

    def _drained(self) -> bool:
        return self._seen.pods_listed and self._queue.empty() and not self._still_reading()

    def _still_reading(self) -> bool:
        return any(thread.is_alive() for thread in self._reading.values())


def _new(texts: list[str], announced: set[str]) -> Iterator[Note]:
    """The texts that are not announced yet, as notes."""
    for text in texts:
        if text not in announced:
            announced.add(text)
            yield Note(text)


def _lines_of(pod: str, text: str) -> list[Line]:
    """A line of a pod's log, or the lines in it: mpirun writes no line break after the last words of a rank."""
    parts = _MPI_TAG.split(text)
    matches = [(part, _RANKED.fullmatch(part)) for part in parts if part or len(parts) == 1]
    return [Line(pod, int(match[1]), match[2]) if match else Line(pod, None, part) for part, match in matches]
