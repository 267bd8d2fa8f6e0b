"""Local launcher for asynchronous training: several processes on this machine, of which any but rank 0 may fail.

torch's elastic agent stops all processes when the first one fails, so it cannot be used here. Until training begins, each
process waits for all others, and one that fails ends them all, too.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from worldsize.distributed.rank import LOCAL_LAUNCH
from worldsize.distributed.stop_signals import handled_by, temporary_folder
from worldsize.errors import SUCCESS
from worldsize.launch import entry_point
from worldsize.launch.local import ERROR_VARIABLE, Outcome, cause, reports

_BEGUN = "begun"  # a file that exists from then on
_BEGUN_VARIABLE = "WORLDSIZE_TRAINING_BEGUN"  # its path
_EXIT_TIMEOUT_S = 10  # for the other ranks, after rank 0 has exited
_TERMINATE_S = 5  # for processes that are asked to end before training has begun
_POLL_S = 0.1


def launch(argv: Sequence[str], processes: int) -> Outcome:
    """Like `local.launch`, but once training has begun, the outcome is that of rank 0."""
    with temporary_folder() as logs, _reserved_port() as port:
        running: list[subprocess.Popen[bytes]] = []
        with _forwarding_signals(running):
            for rank in range(processes):
                running.append(_start(argv, rank, processes, port, logs))
            codes = _wait(running, logs / _BEGUN)
        if codes.get(0) == SUCCESS:
            return Outcome(SUCCESS)
        if (logs / _BEGUN).exists():  # the others may have ended at any time
            return cause({0: codes[0]}, reports(logs / "0"), time.time())
        return cause({rank: code for rank, code in codes.items() if code}, reports(logs), time.time())


def training_begins() -> None:
    """In rank 0: the processes are connected, and the run survives the loss of any other from now on."""
    if path := os.environ.get(_BEGUN_VARIABLE):
        Path(path).touch()


def _start(argv: Sequence[str], rank: int, processes: int, port: int, logs: Path) -> subprocess.Popen[bytes]:
    (logs / str(rank)).mkdir()
    place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
    place |= {"MASTER_PORT": port, LOCAL_LAUNCH: processes}
    environment = os.environ | {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    environment |= {ERROR_VARIABLE: str(logs / str(rank) / "error.json"), _BEGUN_VARIABLE: str(logs / _BEGUN)}
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


def _wait(running: list[subprocess.Popen[bytes]], begun: Path) -> dict[int, int]:
    """Wait for rank 0 or, before training has begun, for any process that fails; then for the others, and end the late.

    Returns:
        The exit codes of those that ended by themselves, by rank.
    """
    broken_off = False
    while running[0].poll() is None and not broken_off:
        time.sleep(_POLL_S)
        broken_off = any(process.poll() for process in running) and not begun.exists()
    broken_off |= bool(running[0].poll()) and not begun.exists()
    if not broken_off:
        _wait_until(running, time.monotonic() + _EXIT_TIMEOUT_S)
    # If the others have failed because of one, that one has ended by now.
    codes = {rank: code for rank, process in enumerate(running) if (code := process.poll()) is not None}
    if broken_off:
        for process in running:
            process.terminate()
        _wait_until(running, time.monotonic() + _TERMINATE_S)
    for process in running:
        process.kill()
        process.wait()
    return codes


def _wait_until(running: list[subprocess.Popen[bytes]], deadline: float) -> None:
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


@contextmanager
def _forwarding_signals(running: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, _: FrameType | None) -> None:
        for process in running:
            if process.poll() is None:
                process.send_signal(number)

    with handled_by(forward):
        yield
