"""Signals to a launcher: the first one interrupts torch's agent, which passes it on and waits; a later one ends the workers.

torch's own handler raises an exception at each signal, also where the first one is being handled; and it raises one when all
workers have done their work, although there is nothing left to stop.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from worldsize.distributed.stop_signals import ECHO_S
from worldsize.errors import SIGNAL_BASE, SUCCESS
from worldsize.launch import children


class Workers:
    """The workers of the last group that torch's agent has started."""

    def __init__(self) -> None:
        self.group: Any = None

    def succeeded(self) -> bool:
        """Whether all have ended, with 0."""
        handlers = self.group.subprocess_handlers.values() if self.group is not None else ()
        return bool(handlers) and all(handler.proc.poll() == SUCCESS for handler in handlers)


@contextmanager
def interrupting_once(logs: Path, alone: bool = True) -> Iterator[Workers]:
    """Within this context, torch's agents raise at the first signal only. Yields the workers.

    Args:
        logs: a folder to remove when this process ends at once.
        alone: no other agent takes part. A signal then means nothing once all workers have succeeded.
    """
    from torch.distributed.elastic.multiprocessing import api

    of_workers: Any = api.SubprocessContext
    workers, start = Workers(), of_workers._start

    def start_and_note(group: Any) -> None:
        workers.group = group
        start(group)

    interrupt = api._terminate_process_handler
    first_at: float | None = None
    ending = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal first_at, ending
        if alone and workers.succeeded():
            return
        if first_at is None:
            first_at = time.monotonic()
            interrupt(signum, frame)
        elif not ending and time.monotonic() - first_at >= ECHO_S:
            ending = True
            # Whoever waits for this process may delete the folders that the workers write to.
            children.end(children.workers(), signum)
            shutil.rmtree(logs, ignore_errors=True)
            os._exit(SIGNAL_BASE + signum)

    api._terminate_process_handler, of_workers._start = handle, start_and_note
    try:
        yield workers
    finally:
        api._terminate_process_handler, of_workers._start = interrupt, start
