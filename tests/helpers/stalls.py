"""Rules of sabotage.py after which a process hangs, or takes a long time."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from worldsize.data import file_samples
from worldsize.data.samples import EncodedSamples
from worldsize.distributed import stop_signals
from worldsize.training import step


def endless_step() -> None:
    """A step is one call into C that never returns, as a long backward pass; the file in-step says that it has begun."""

    def run(*_, **__):
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.SIGNALS)  # they would end the call; other threads get them
        Path("in-step").touch()
        ctypes.CDLL(None).sleep(3600)

    step.StepRunner.run = run


def _before_read_30(of_rank_1: Callable[[], None]) -> None:
    """Call this before rank 1's 30th read of an image. Images are read one by one."""
    content, reads = file_samples._content, itertools.count(1)

    def read(path):
        if os.environ["RANK"] == "1" and next(reads) == 30:
            of_rank_1()
        return content(path)

    file_samples._content = read
    file_samples.FileSamples.several = EncodedSamples.several


def dead_storage() -> None:
    """Rank 1's 30th read of an image never returns, as from a server that is gone: a FIFO that nobody writes to."""

    def wait():
        os.mkfifo("dead")
        os.open("dead", os.O_RDONLY)

    _before_read_30(wait)


def slow_storage() -> None:
    """Rank 1's 30th read of an image takes until there is a file named go."""

    def wait():
        while not Path("go").exists():
            time.sleep(0.1)

    _before_read_30(wait)


def slow_computer() -> None:
    """Rank 1's sixth step computes until there is a file named go."""
    run, steps = step.StepRunner.run, itertools.count(1)

    def computing(self, *arguments):
        slow = os.environ["RANK"] == "1" and next(steps) == 6
        while slow and not Path("go").exists():
            pass
        return run(self, *arguments)

    step.StepRunner.run = computing
