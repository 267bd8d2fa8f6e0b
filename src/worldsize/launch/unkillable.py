"""Ends a launcher whose processes cannot be ended after a hang.

The kernel ends a process that is frozen, or that waits for a disk or a server (state D), only when it continues. torch's
agent would wait for it for an hour or forever, and say nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from worldsize.errors import Stalled

_POLL_S = 1.0
_WATCHERS_S = 20.0  # so long the watchers may take to end their processes
_KILLED_S = 10.0  # so long the kernel may take to end a killed process


@contextmanager
def not_waited_for(logs: Path, reason: Callable[[], tuple[float, str] | None]) -> Iterator[None]:
    """Within this context, this process ends although processes that it has started cannot be ended.

    Args:
        logs: a folder to remove then.
        reason: returns when, in seconds since the epoch, and why the run ends, if it ends because a process hangs.
    """
    left = threading.Event()
    threading.Thread(target=_watch, args=(logs, reason, left), name="unkillable", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def _watch(logs: Path, reason: Callable[[], tuple[float, str] | None], left: threading.Event) -> None:
    handled = 0.0
    while not left.wait(_POLL_S):
        stalled = reason()
        if stalled is None or stalled[0] <= handled:
            continue
        handled, message = stalled
        hanging = workers()
        if left.wait(_WATCHERS_S):
            return
        for pid in _running(hanging):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if left.wait(_KILLED_S):
            return
        if still := _running(hanging):
            which = f"process{'es' * (len(still) > 1)} {', '.join(map(str, still))}"
            why = "cannot be ended now: frozen, or waiting for storage that does not answer"
            print(f"worldsize: {message}\nworldsize: {which} {why}", file=sys.stderr, flush=True)
            shutil.rmtree(logs, ignore_errors=True)
            os._exit(Stalled.exit_code)


def workers() -> list[int]:
    """The processes that torch's agent has started, not others of a program that uses worldsize."""
    found = []
    for pid in children(os.getpid()):
        with suppress(OSError):
            if b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def children(pid: int) -> list[int]:
    """The child processes of the main thread of a process; none where the system does not say."""
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _running(pids: list[int]) -> list[int]:
    """Those that have not ended."""
    found = []
    for pid in pids:
        with suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found
