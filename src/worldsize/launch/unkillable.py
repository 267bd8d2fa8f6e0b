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
from worldsize.launch.children import running, workers

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
        try:
            stalled = reason()
        except OSError:  # such as the limit of open files: whoever reports the end of the run meets it, too
            continue
        if stalled is None or stalled[0] <= handled:
            continue
        handled, message = stalled
        hanging = workers()
        if left.wait(_WATCHERS_S):
            return
        for pid in running(hanging):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if left.wait(_KILLED_S):
            return
        if still := running(hanging):
            which = f"process{'es' * (len(still) > 1)} {', '.join(map(str, still))}"
            why = "cannot be ended now: frozen, or waiting for storage that does not answer"
            print(f"worldsize: {message}\nworldsize: {which} {why}", file=sys.stderr, flush=True)
            shutil.rmtree(logs, ignore_errors=True)
            os._exit(Stalled.exit_code)
