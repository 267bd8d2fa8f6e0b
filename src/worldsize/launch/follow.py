"""Following a job to its end: its state, why it waits, and what all its ranks print, as one stream."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from worldsize.launch import reasons
from worldsize.launch.answers import ClusterError
from worldsize.launch.cluster import Cluster
from worldsize.launch.pod import queue_of
from worldsize.launch.target import Object, State, Target

# Lines of worldsize's agent, and of mpirun --tag-output.
_RANKED = re.compile(r"\[(?:1,)?(\d+)\](?:<std(?:out|err)>:)? ?(.*)", re.DOTALL)
_DRAIN_S = 15.0  # for another line, once the job has ended
_PATIENCE_S = 30.0  # for a job that nobody says anything about
_SETBACK_S = 45.0  # for an operator that tries again what it could not do
_BUFFERED = 20_000  # lines between the threads that read and the one that shows


@dataclass(frozen=True)
class Line:
    """A line of a log: of which pod (short name), and of which rank where that is known."""

    pod: str
    rank: int | None
    text: str


@dataclass(frozen=True)
class Note:
    """Something about the job itself."""

    text: str


@dataclass
class _Seen:
    """What is known of the job."""

    job: Object | None = None
    pods: list[Object] = field(default_factory=list)
    events: list[Object] = field(default_factory=list)
    workloads: list[Object] | None = None
    looked: bool = False
    listed: bool = False
    told: set[str] = field(default_factory=set)
    told_by_queue: set[str] = field(default_factory=set)
    headline: str = ""
    headline_at: float = 0.0
    left_created: bool = False
    given_up: bool = False
    setback_at: float | None = None


class Follower:
    """Reads one job of a cluster; several threads wait for the server, one at a time tells.

    Args:
        logs: whether to read the pods' logs.
    """

    def __init__(self, cluster: Cluster, target: Target, name: str, logs: bool = True) -> None:
        self._cluster = cluster
        self._target = target
        self._name = name
        self._logs = logs
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(_BUFFERED)
        self._seen = _Seen()
        self._reading: dict[tuple[str, int], threading.Thread] = {}
        self._stopped = threading.Event()
        self.state = State("Created")

    def failures(self) -> list[str]:
        """How pods ended that did not end well."""
        return reasons.failures(self._target, self._seen.pods)

    def events(self) -> Iterator[Line | Note | None]:
        """All that happens, until the job has ended; then `state` says how. None in between, at least twice a second."""
        watch, name = self._cluster.watch, self._name
        self._feed("job", lambda: watch(self._target.kind, fields=f"metadata.name={name}", stop=self._stopped.is_set))
        self._feed("pods", lambda: watch("Pod", self._target.selector(name), stop=self._stopped.is_set))
        self._feed("events", lambda: watch("Event", stop=self._stopped.is_set))
        waited_from: float | None = None
        try:
            while True:
                try:
                    what, value = self._queue.get(timeout=0.5)
                except queue.Empty:
                    yield None
                else:
                    yield from self._take(what, value)
                    if what == "line":
                        waited_from = None  # whoever shows it may have taken long
                    # Changes that say nothing may come without a pause: a busy namespace has events of others.
                    yield None
                yield from self._tell_of_silence()
                if self._set_back() and not self.state.ended:
                    yield from self._tell()
                if self.state.ended:
                    waited_from = waited_from or time.monotonic()
                    if self._drained() or self._seen.given_up:
                        return
                    if time.monotonic() - waited_from > _DRAIN_S:
                        if self._still_reading():
                            yield Note(f"no line came for {_DRAIN_S:.0f} s; some logs have not ended: lines may be missing")
                        return
        finally:
            self._stopped.set()

    def _feed(self, what: str, source: Callable[[], Iterator[Any]]) -> threading.Thread:
        """Hand on, from a thread, all that ``source`` gives; a failure too."""

        def work() -> None:
            try:
                for value in source():
                    self._put(what, value)
                    if self._stopped.is_set():
                        return
            except Exception as error:
                # The job goes on, whatever becomes of one pod's log.
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

    def _take(self, what: str, value: Any) -> Iterator[Line | Note]:
        if what == "line":
            yield value
        elif what == "lost":
            yield Note(f"a log cannot be read: {value}")
        elif what == "error":
            raise value
        elif what == "job":
            self._seen.job = value[0] if value else None
            self._seen.looked = True
            yield from self._tell()
            self._look_into_queue()
        elif what == "pods":
            self._seen.pods, self._seen.listed = value, True
            for pod in value:
                self._read(pod)
            yield from self._tell()
        elif what == "workloads":
            self._seen.workloads = value
            yield from self._tell()
        else:
            self._seen.events = value
            yield from self._tell()

    def _tell(self) -> Iterator[Note]:
        """What is new about the job's state."""
        seen, target = self._seen, self._target
        if seen.job is None:
            if seen.looked and not self.state.ended:
                self.state = State("Failed", "the job was deleted")
                yield Note("the job was deleted")
            return
        self.state = target.state(seen.job, seen.pods)
        seen.left_created |= self.state.phase not in ("Created", "Suspended")
        for reason, message, key in reasons.warnings(seen.events, self._name, seen.job["metadata"]["creationTimestamp"]):
            if self._is_the_end(reason):
                seen.given_up = True  # by us: its pods may go on
                self.state = State("Failed", f"{reason}: {message}")
            if key not in seen.told:
                seen.told.add(key)
                yield Note(f"{reason}: {message}")
        headline = self._headline()
        if headline != seen.headline:
            seen.headline, seen.headline_at = headline, time.monotonic()
            yield Note(headline)
        if not self.state.ended:
            yield from _new(reasons.waiting(target, seen.pods), seen.told)
        if self._queue_name():
            yield from _new(reasons.queued(seen.workloads or [], seen.job), seen.told_by_queue)

    def _is_the_end(self, reason: str) -> bool:
        """Whether a warning with this reason means that the job will never begin."""
        if reason in self._target.setbacks:
            self._seen.setback_at = self._seen.setback_at or time.monotonic()
            return self._set_back()
        return reason in self._target.dead_ends and self.state.phase in ("Created", "Pending") and not self._begun()

    def _set_back(self) -> bool:
        """Whether a setback has had its time to be made good, and the operator has never said more of the job."""
        seen = self._seen
        waits = self.state.phase == "Created" and not seen.left_created
        return waits and seen.setback_at is not None and time.monotonic() - seen.setback_at > _SETBACK_S

    def _tell_of_silence(self) -> Iterator[Note]:
        """An operator that is down, or gave the job up without a word, is noticed by nothing else."""
        seen = self._seen
        quiet = seen.job is not None and seen.listed and not seen.pods and not seen.told
        late = time.monotonic() - seen.headline_at > _PATIENCE_S
        if self.state.phase in ("Created", "Pending") and quiet and late:
            text = f"{self._target.kind} {self._name}: no pod yet, and no reason given: its operator's own log may have it"
            seen.told.add(text)
            yield Note(text)

    def _headline(self) -> str:
        pods, state = self._seen.pods, self.state
        begun = self._begun()
        waiting = state.phase != "Created" and not state.ended and begun < len(pods)
        count = f", {begun} of {len(pods)} pods have begun" if waiting else ""
        queue = self._queue_name()
        place = f", in Kueue's queue {queue}" + (f": {state.reason}" if state.reason else "") if queue else ""
        return f"{self._target.kind} {self._name}: {state.phase}{count}{place}"

    def _queue_name(self) -> str | None:
        """The Kueue queue in which the job waits."""
        job = self._seen.job
        return queue_of(job) if job is not None and self.state.phase == "Suspended" else None

    def _look_into_queue(self) -> None:
        """Begin to read what Kueue says, where the job waits for it."""
        seen = self._seen
        if seen.workloads is not None or self._queue_name() is None:
            return
        seen.workloads = []

        def workloads() -> Iterator[list[Object]]:
            # Who may not read them, or has another version of Kueue, follows the job all the same.
            with suppress(ClusterError):
                yield from self._cluster.watch("Workload", stop=self._stopped.is_set)

        self._feed("workloads", workloads)

    def _begun(self) -> int:
        return sum(pod["status"].get("phase") != "Pending" for pod in self._seen.pods)

    def _read(self, pod: Object) -> None:
        """Begin to read the pod's log once it has one, and again where its container was restarted in place."""
        if not self._logs:
            return
        name, uid, place = pod["metadata"]["name"], pod["metadata"]["uid"], self._target.place(pod)[1]
        for status in pod["status"].get("containerStatuses", []):
            state = status.get("state", {})
            begun = "running" in state or "terminated" in state
            key = (uid, status.get("restartCount", 0))
            if status["name"] != self._target.container or not begun or key in self._reading:
                continue
            missed = key[1] > 0 and (uid, key[1] - 1) not in self._reading
            self._reading[key] = self._feed("line", lambda missed=missed: self._lines(name, place, missed))  # type: ignore[misc]

    def _lines(self, pod: str, place: str, missed: bool) -> Iterator[Line]:
        if missed:
            for text in self._cluster.previous_log(pod, self._target.container, tail=20):
                yield _line(place, text)
        for text in self._cluster.logs(pod, self._target.container, stop=self._stopped.is_set):
            yield _line(place, text)

    def _drained(self) -> bool:
        return self._seen.listed and self._queue.empty() and not self._still_reading()

    def _still_reading(self) -> bool:
        return any(thread.is_alive() for thread in self._reading.values())


def _new(texts: list[str], told: set[str]) -> Iterator[Note]:
    """Those that have not been told yet."""
    for text in texts:
        if text not in told:
            told.add(text)
            yield Note(text)


def _line(pod: str, text: str) -> Line:
    match = _RANKED.fullmatch(text)
    return Line(pod, int(match[1]), match[2]) if match else Line(pod, None, text)
