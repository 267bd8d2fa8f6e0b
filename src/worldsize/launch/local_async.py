"""Local launcher for asynchronous training: several processes on this machine, of which any but rank 0 may fail.

torch's elastic agent stops all processes when the first one fails, so it cannot be used here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from worldsize.distributed.rank import LOCAL_LAUNCH
from worldsize.distributed.stop_signals import handled_by
from worldsize.errors import SUCCESS
from worldsize.launch import entry_point
from worldsize.launch.local import EFFECTS, ERROR_VARIABLE, Outcome, cause, reports

_EXIT_TIMEOUT_S = 30  # for the other ranks, after rank 0 has exited


def launch(argv: Sequence[str], processes: int) -> Outcome:
    """Like `local.launch`, but returns the outcome of rank 0."""
    with tempfile.TemporaryDirectory(prefix="worldsize-") as logs, _reserved_port() as port:
        running: list[subprocess.Popen[bytes]] = []
        with _forwarding_signals(running):
            for rank in range(processes):
                running.append(_start(argv, rank, processes, port, Path(logs)))
            codes = _wait(running)
        if codes[0] == SUCCESS:
            return Outcome(SUCCESS)
        rank0 = reports(Path(logs) / "0")
        if rank0 and rank0[0][1].code not in EFFECTS:
            return rank0[0][1]
        # During startup every rank depends on the others: rank 0 may have failed because another rank did.
        return cause({rank: code for rank, code in codes.items() if code}, reports(Path(logs)), time.time())


def _start(argv: Sequence[str], rank: int, processes: int, port: int, logs: Path) -> subprocess.Popen[bytes]:
    (logs / str(rank)).mkdir()
    place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
    place |= {"MASTER_PORT": port, LOCAL_LAUNCH: processes}
    environment = os.environ | {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    environment[ERROR_VARIABLE] = str(logs / str(rank) / "error.json")
    # In sessions of their own, workers get the terminal's signals only through this launcher, which forwards them.
    return subprocess.Popen([*entry_point.worker(sys.executable), *argv], env=environment, start_new_session=True)


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A port of this machine that no other process gets before rank 0 listens there.

    Rank 0 sets SO_REUSEADDR, so it can listen although a socket that does not listen is bound to the port.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        yield int(reserved.getsockname()[1])


def _wait(running: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait for rank 0, then for the other ranks, and kill those that are late. Returns the exit codes by rank."""
    running[0].wait()
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for process in running[1:]:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return {rank: process.returncode for rank, process in enumerate(running)}


@contextmanager
def _forwarding_signals(running: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, _: FrameType | None) -> None:
        for process in running:
            if process.poll() is None:
                process.send_signal(number)

    with handled_by(forward):
        yield
