"""``history.jsonl`` of a run folder: when the run was started, saved and ended, and where.

One JSON object per line: ``time`` in seconds since 1970, ``event`` and ``step``, the last completed one. Events:

- ``started``, with the ``command``, the ``world_size`` and the number of processes on each of the ``hosts``,
- ``saved``: a checkpoint is on disk,
- ``finished``,
- ``stopped``, with the ``reason``: a signal or a limit; the state is saved,
- ``failed``, with the ``reason``.

A run that was killed has no line about its end.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from worldsize.errors import Stopped
from worldsize.runs import atomic

log = logging.getLogger(__name__)

FINISHED = "finished"
_MOST_HOSTS = 32  # that are listed by name


def steps_at_other_sizes(path: Path) -> int:
    """The steps that were done when the run got its last number of processes. 0 if it always had it, or has no history."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return 0
    found = 0
    size = None
    for line in filter(None, map(_started, lines)):
        if size not in (None, line["world_size"]):
            found = line["step"]
        size = line["world_size"]
    return found


def most_on_a_host(path: Path) -> int | None:
    """The largest number of processes on one host at the last start; None if it is not recorded."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    starts = list(filter(None, map(_started, lines)))
    hosts = starts[-1].get("hosts") if starts else None
    counts = hosts.values() if isinstance(hosts, dict) else ()
    return max((count for count in counts if isinstance(count, int)), default=None)


def last_event(path: Path) -> str | None:
    """The last event; None without any.

    Raises:
        OSError: the file cannot be read.
    """
    found = None
    for line in path.read_text("utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a line that a crash has cut
            found = str(json.loads(line)["event"])
    return found


def _started(line: str) -> dict[str, Any] | None:
    """The line if it is a complete one about a start."""
    try:
        found = json.loads(line)
        int(found["step"]), int(found["world_size"])
    except (ValueError, KeyError, TypeError):
        return None
    return found if found.get("event") == "started" else None


class History:
    """Appends to the file. A line that cannot be written is a warning: training continues."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, event: str, step: int, **facts: Any) -> None:
        """Append a line."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, "step": step, **facts})
        try:
            atomic.append(self._path, line + "\n")
        except OSError as error:
            log.warning("cannot write %s: %s", self._path, error.strerror)

    @contextmanager
    def running(self, step: Callable[[], int], command: str, hosts: Sequence[str]) -> Iterator[None]:
        """Around a run: its start and how it ended.

        Args:
            step: the last completed step at the time of the call.
            hosts: the name of each rank's machine.
        """
        counted = Counter(hosts)
        names = dict(counted.most_common(_MOST_HOSTS))
        more = {"more_hosts": len(counted) - len(names)} if len(counted) > len(names) else {}
        self.add("started", step(), command=command, world_size=len(hosts), hosts=names, **more)
        try:
            yield
        except Stopped as error:
            self.add("stopped", step(), reason=str(error))
            raise
        except BaseException as error:
            self.add("failed", step(), reason=(str(error) or type(error).__name__).splitlines()[0])
            raise
        self.add(FINISHED, step())
