"""Signals to a launcher: the first one interrupts torch's agent, which passes it on and waits; a later one ends the workers.

torch's own handler raises an exception at each signal, also where the first one is being handled.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from worldsize.distributed.stop_signals import ECHO_S
from worldsize.errors import SIGNAL_BASE
from worldsize.launch import children


@contextmanager
def interrupting_once(logs: Path) -> Iterator[None]:
    """Within this context, torch's agents raise at the first signal only.

    Args:
        logs: a folder to remove when this process ends at once.
    """
    from torch.distributed.elastic.multiprocessing import api

    interrupt = api._terminate_process_handler
    first_at: float | None = None
    ending = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal first_at, ending
        if first_at is None:
            first_at = time.monotonic()
            interrupt(signum, frame)
        elif not ending and time.monotonic() - first_at >= ECHO_S:
            ending = True
            # Whoever waits for this process may delete the folders that the workers write to.
            children.end(children.workers(), signum)
            shutil.rmtree(logs, ignore_errors=True)
            os._exit(SIGNAL_BASE + signum)

    api._terminate_process_handler = handle
    try:
        yield
    finally:
        api._terminate_process_handler = interrupt
