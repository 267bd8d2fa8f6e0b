"""Starts the watcher of this process."""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from worldsize.distributed.rank import LOCAL_LAUNCH, RankInfo
from worldsize.errors import Stalled
from worldsize.launch import entry_point
from worldsize.watchdog import heartbeat, messages
from worldsize.watchdog.watcher import STACKS, Task

log = logging.getLogger(__name__)

_UNWATCHED = "rank %d is not watched, so that it may hang unnoticed: %s"


@contextmanager
def watched(rank_info: RankInfo, least_s: float, folder: Path, from_main: Callable[[Any], Any]) -> Iterator[None]:
    """Within this context, this process is watched; all ranks must enter it. `heartbeat.beat` tells what it does.

    Args:
        least_s: seconds without progress that are reported at the earliest; 0: nothing is watched.
        folder: of the run.
        from_main: passes a value of rank 0 to all ranks.
    """
    if least_s == 0:
        if rank_info.rank == 0:
            log.warning("--parallel.stall-s 0: a process that makes no progress is not noticed")
        yield
        return
    with ExitStack() as stack:
        server = None
        try:
            if rank_info.rank == 0 and rank_info.master is not None:
                server = stack.enter_context(messages.listen(rank_info.master[0]))
        except OSError as error:
            log.warning(_UNWATCHED, rank_info.rank, error)
        token, port = from_main((secrets.token_hex(16), server.getsockname()[1] if server else 0))
        if rank_info.master is not None and port == 0:
            yield
            return
        hub = (rank_info.master[0], port) if rank_info.master is not None else None
        try:
            stack.enter_context(_watcher(rank_info, least_s, folder, token, hub, server))
        except OSError as error:
            log.warning(_UNWATCHED, rank_info.rank, error)
        yield


@contextmanager
def _watcher(
    rank_info: RankInfo, least_s: float, folder: Path, token: str, hub: tuple[str, int] | None, server: socket.socket | None
) -> Iterator[None]:
    with tempfile.TemporaryFile() as memory, tempfile.TemporaryFile() as stacks:
        # Writing to memory that a full disk has no room for would end this process with SIGBUS.
        os.posix_fallocate(memory.fileno(), 0, heartbeat.SIZE)
        task = Task(
            pid=os.getpid(),
            rank=rank_info.rank,
            size=rank_info.size,
            host=socket.gethostname(),
            memory=memory.fileno(),
            stacks=stacks.fileno(),
            least_s=least_s,
            token=token,
            speaks=rank_info.local_rank == 0,
            launched=LOCAL_LAUNCH in os.environ,
            folder=str(folder),
            hub=hub,
            listens=server.fileno() if server else None,
        )
        if STACKS is not None:
            faulthandler.register(STACKS, stacks, all_threads=True)
        with mmap.mmap(memory.fileno(), heartbeat.SIZE) as shared, heartbeat.beating(shared) as heart:
            heart.beat(heartbeat.STARTING)
            process = _start(task)
            try:
                yield
            finally:
                _stop(process)
                if STACKS is not None:
                    faulthandler.unregister(STACKS)


def _start(task: Task) -> subprocess.Popen[bytes]:
    descriptors = [task.memory, task.stacks, *([] if task.listens is None else [task.listens])]
    process = subprocess.Popen(
        entry_point.command(sys.executable, "worldsize.watchdog.watcher"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=descriptors,
        start_new_session=True,  # signals of the terminal are for the run
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
    process.stdin.flush()
    threading.Thread(target=_obey, args=(process.stdout,), name="watchdog", daemon=True).start()
    return process


def _obey(orders: IO[bytes]) -> None:
    """End this process when its watcher says so. That a thread waits for a lock or a message does not matter."""
    with orders:
        if orders.readline():
            os._exit(Stalled.exit_code)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.kill()  # it may still be starting
    process.wait()
