"""Signs that this process may soon be killed for its memory, or that the disk may have no room for the next checkpoint.

They ask for a checkpoint before that happens. Only memory that the kernel cannot take back counts: it fills a container's
limit with cached files in any case. Linux with cgroup version 2; elsewhere only the disk is looked at.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from contextlib import suppress
from pathlib import Path

from worldsize.distributed import cgroups

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_QUIET_S = 60.0  # after a sign: a checkpoint follows, and a second one would cost more than it saves
_FULL = 0.95  # of the memory limit
_STALLED = 20.0  # % of the time
_GIB = 1 << 30

ROOT, MEMBERSHIP = cgroups.ROOT, cgroups.MEMBERSHIP


class EarlySigns:
    """Looks for signs at most once a second, which takes about 0.1 ms.

    Args:
        folder: where this process writes checkpoints; None if it writes none of the weights.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._cgroup = own_cgroup()
        self._next = time.monotonic()
        self._known: set[str] = set()
        self._seen_disk = False

    def begun(self, checkpoint_bytes: int) -> bool:
        """Whether there is a sign that was not there before, which is logged.

        A disk that is small from the start is only logged: a checkpoint after the first step would be worth nothing, and
        take the room of one that is worth more.

        Args:
            checkpoint_bytes: of the newest checkpoint; 0 if it is unknown.
        """
        now = time.monotonic()
        if now < self._next:
            return False
        signs = self._memory() | self._disk(checkpoint_bytes)
        new = signs.keys() - self._known
        small = new & ({"disk"} if not self._seen_disk else set())
        self._seen_disk = self._seen_disk or checkpoint_bytes > 0
        self._known = set(signs)
        self._next = now + (_QUIET_S if new else _LOOK_S)
        for name in sorted(new):
            log.warning("%s%s", signs[name], "" if name in small else "; saving a checkpoint early")
        return bool(new - small)

    def _memory(self) -> dict[str, str]:
        if self._cgroup is None:
            return {}
        used = _unreclaimable(self._cgroup)
        limit = min(_number(self._cgroup / name) for name in ("memory.max", "memory.high"))
        if used > _FULL * limit:
            return {
                "memory": f"the processes need {used / _GIB:.2f} of the {limit / _GIB:.2f} GiB of memory that their cgroup "
                "(container) allows, and may be killed: raise its limit, or lower --data.workers or --data.prefetch"
            }
        if _stalled(self._cgroup) > _STALLED:
            return {"memory": "the processes wait for memory that their cgroup (container) lacks: raise its limit"}
        return {}

    def _disk(self, checkpoint_bytes: int) -> dict[str, str]:
        if self._folder is None or not checkpoint_bytes:
            return {}
        with suppress(OSError):
            free = shutil.disk_usage(self._folder).free
            if free < 2 * checkpoint_bytes:
                return {
                    "disk": f"{self._folder} has {_amount(free)} of free space, and a checkpoint needs "
                    f"{_amount(checkpoint_bytes)} beside the one before: free some, or lower --checkpoint.keep"
                }
        return {}


def _amount(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= 0.1 * _GIB else f"{size / 2**20:.2f} MiB"


def own_cgroup() -> Path | None:
    """This process's cgroup of version 2 that accounts for memory, or None."""
    found = cgroups.folders("memory", ROOT, MEMBERSHIP)
    return next((folder for folder in found if (folder / "memory.current").is_file()), None)


def _unreclaimable(cgroup: Path) -> float:
    """Bytes that the kernel cannot take back without swapping: all but cached files, of which shared memory is a part."""
    statistics: dict[str, int] = {}
    with suppress(OSError, ValueError):
        lines = [line.split() for line in (cgroup / "memory.stat").read_text().splitlines()]
        statistics = {name: int(value) for name, value in lines}
    if "file" not in statistics:
        return 0.0
    return _number(cgroup / "memory.current") - statistics["file"] + statistics.get("shmem", 0)


def _stalled(cgroup: Path) -> float:
    """The share of the last 10 s in which none of the processes could run for want of memory, %."""
    with suppress(OSError, ValueError):
        for line in (cgroup / "memory.pressure").read_text().splitlines():
            if line.startswith("full avg10="):
                return float(line.split()[1].removeprefix("avg10="))
    return 0.0


def _number(path: Path) -> float:
    """Infinite if there is no limit."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return math.inf
