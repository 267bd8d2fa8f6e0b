"""The processes that this one has started; none where the system does not say."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.02
_ENDING_S = 3.0  # so long workers may take to end by a signal
_KILLED_S = 2.0  # so long the kernel may take to end a killed process


def workers() -> list[int]:
    """The processes that torch's agent has started, not others of a program that uses worldsize."""
    found = []
    for pid in children(os.getpid()):
        with suppress(OSError):
            if b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def children(pid: int) -> list[int]:
    """The child processes of the main thread of a process."""
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def running(pids: list[int]) -> list[int]:
    """Those that have not ended."""
    found = []
    for pid in pids:
        with suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


def end(pids: list[int], signum: int) -> None:
    """Send them a signal that ends them, wait until they have ended, and kill those that take more than 3 s.

    Returns after 2 s more although the kernel has not ended them, as those that wait for storage.
    """
    for number, limit in ((signum, _ENDING_S), (signal.SIGKILL, _KILLED_S)):
        for pid in running(pids):
            with suppress(OSError):
                os.kill(pid, number)
        deadline = time.monotonic() + limit
        while running(pids) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
