"""Doing a command's work in this process, or starting several processes that do it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from worldsize.config.wording import printable_lines
from worldsize.distributed.rank import LOCAL_LAUNCH, RankInfo, threads_per_process
from worldsize.distributed.stop_signals import StopFlag, end_with_parent
from worldsize.errors import UserError
from worldsize.launch.failure import fail
from worldsize.launch.local import ERROR_VARIABLE
from worldsize.launch.restarts import Restarts


def distribute(
    argv: list[str],
    procs: int,
    rank_info: RankInfo,
    work: Callable[[StopFlag], int],
    workers_may_fail: bool = False,
    restarts: Restarts | None = None,
) -> int:
    """Call ``work`` in this process; or, if ``procs`` asks for several, run ``worldsize ARGV`` in each of them.

    Args:
        workers_may_fail: the run continues when another process than rank 0 fails.
        restarts: of the processes that are started here; None: there are none.

    Returns:
        The exit code.

    Raises:
        UserError: ``procs`` contradicts the launcher that started this process.
    """
    check_procs(procs)
    if rank_info.size == 1 and procs > 1:
        from worldsize.launch import local, local_async

        launch = (local_async if workers_may_fail else local).launch
        outcome = launch(argv, procs)
        while restarts is not None and restarts.again(outcome):
            outcome = launch(argv, procs)
        return fail(outcome.message, outcome.code) if outcome.code else 0
    if rank_info.size > 1 and procs not in (1, rank_info.local_size):
        raise UserError(
            f"--procs {procs}, but {rank_info.launcher} started {rank_info.local_size} processes on this machine: "
            "leave --procs out"
        )
    # OpenMP reads its number of threads when torch is imported.
    os.environ["OMP_NUM_THREADS"] = str(threads_per_process(rank_info))
    # Linux may send the signal of `end_with_parent` twice if the parent, such as a notebook's kernel, had several threads.
    launched = rank_info.size > 1 or ERROR_VARIABLE in os.environ
    stop = StopFlag(launched, speak=rank_info.rank == 0)
    stop.install()
    if LOCAL_LAUNCH in os.environ:
        end_with_parent()
    _log_to_terminal(rank_info)
    code = work(stop)
    if LOCAL_LAUNCH in os.environ:  # the launcher passes a late signal on
        stop.disarm()
    return code


def check_procs(procs: int) -> int:
    """``procs``, if it is a number of processes.

    Raises:
        UserError: it is less than 1.
    """
    if procs < 1:
        raise UserError(f"--procs {procs}: must be at least 1")
    return procs


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Looks up sys.stderr each time: the live display replaces it.
        with suppress(OSError):
            print(f"{record.levelname.lower()}: {printable_lines(record.getMessage())}", file=sys.stderr)


def _log_to_terminal(rank_info: RankInfo) -> None:
    """Warnings of rank 0 go to stderr, those of the others only to the log of a run."""
    logger = logging.getLogger("worldsize")
    logger.setLevel(logging.INFO)
    # Once, although a program may run several commands in one process.
    if rank_info.rank == 0 and not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr(logging.WARNING))
    elif not logger.handlers:
        logger.addHandler(logging.NullHandler())  # without any, Python prints warnings
