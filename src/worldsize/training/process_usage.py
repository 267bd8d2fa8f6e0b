"""What the operating system knows about this process: whether it had a processor, was throttled, paused or swapped.

Linux only; elsewhere everything is 0. The counters are read once per window of steps, which takes about 0.1 ms.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from worldsize.distributed import cgroups

_TICK_S = 0.1
_PAUSE_S = 0.25  # a thread that wakes up later than this, and did not wait for a processor, was stopped


@dataclass(frozen=True)
class Usage:
    """Of one process, since some time.

    ``cpu_ms``: processor time of all threads. ``cpu_wait_ms``: the training thread was ready to run, but had no processor.
    ``throttled_ms``: the cgroup was throttled, because it had used its CPU quota (summed over processors with cgroup v2).
    ``paused_ms``: the process was stopped (SIGSTOP, a frozen cgroup or container). ``faults``: pages read from disk or
    swap. ``thread_ms``: processor time of the training thread.
    """

    cpu_ms: float = 0.0
    cpu_wait_ms: float = 0.0
    throttled_ms: float = 0.0
    paused_ms: float = 0.0
    faults: float = 0.0
    thread_ms: float = 0.0

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class UsageClock:
    """Reads the `Usage` of this process. Create it in the training thread; `close` ends its own thread."""

    def __init__(self) -> None:
        self._thread_schedule = _schedule_file()
        self._cgroup = cpu_statistics()
        self._pauses = _Pauses()

    def read(self) -> Usage:
        """Since some fixed time; subtract an earlier reading."""
        import resource

        thread_ms, cpu_wait_ms = _schedule_ms(self._thread_schedule)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return Usage(
            cpu_ms=time.process_time() * 1000,
            cpu_wait_ms=cpu_wait_ms,
            throttled_ms=_throttled_ms(self._cgroup),
            paused_ms=self._pauses.total_s * 1000,
            faults=faults,
            thread_ms=thread_ms,
        )

    def close(self) -> None:
        self._pauses.close()


class _Pauses:
    """A thread that sleeps and notices when it woke up much too late. ``total_s``: the sum of the pauses."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._end = threading.Event()
        threading.Thread(target=self._watch, name="pauses", daemon=True).start()

    def close(self) -> None:
        self._end.set()

    def _watch(self) -> None:
        schedule = _schedule_file()
        ready, last = _schedule_ms(schedule)[1], time.monotonic()
        while not self._end.wait(_TICK_S):
            now = time.monotonic()
            if now - last > _TICK_S + _PAUSE_S:
                late_s = now - last - _TICK_S - (_schedule_ms(schedule)[1] - ready) / 1000
                self.total_s += late_s if late_s > _PAUSE_S else 0.0
            ready, last = _schedule_ms(schedule)[1], now


def _schedule_file() -> Path:
    """Of the thread that calls."""
    return Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/schedstat")


def _schedule_ms(schedule: Path) -> tuple[float, float]:
    """How long the thread has run, and how long it has been ready to run without running: two numbers of schedstat, ns."""
    try:
        running, ready = schedule.read_bytes().split()[:2]
        return int(running) / 1e6, int(ready) / 1e6
    except (OSError, ValueError):
        return 0.0, 0.0


def cpu_statistics(root: Path = cgroups.ROOT, membership: Path = cgroups.MEMBERSHIP) -> Path | None:
    """``cpu.stat`` of this process's cgroup; None if there is none."""
    found = cgroups.folders("cpu", root, membership)
    return next((folder / "cpu.stat" for folder in found if "throttled" in _text(folder / "cpu.stat")), None)


def _throttled_ms(statistics: Path | None) -> float:
    values = dict(line.split() for line in _text(statistics).splitlines()) if statistics is not None else {}
    if "throttled_usec" in values:
        return int(values["throttled_usec"]) / 1e3
    return int(values.get("throttled_time", 0)) / 1e6  # ns, version 1


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
