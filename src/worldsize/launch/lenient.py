"""Several processes on this machine of which all but rank 0 may die, as asynchronous workers may.

torch's elastic agent ends all processes with the first that fails, and so cannot be used here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from worldsize.launch.local import ERROR_VARIABLE, Outcome, cause, reports
from worldsize.place import LOCAL_LAUNCH
from worldsize.signals import handled

_LAST_WORDS_S = 30  # for the others, once rank 0 has ended
_DEFECT = 70


def launch(argv: Sequence[str], processes: int) -> Outcome:
    """As `local.launch`, but the outcome is that of rank 0."""
    with tempfile.TemporaryDirectory(prefix="worldsize-") as logs:
        port = _free_port()
        running: list[subprocess.Popen[bytes]] = []
        with _passing_on_signals(running):
            for rank in range(processes):
                running.append(_start(argv, rank, processes, port, Path(logs)))
            codes = _wait(running)
        if codes[0] == 0:
            return Outcome(0)
        own = reports(Path(logs) / "0")
        if own and own[0][1].code != _DEFECT:
            return own[0][1]
        # Before the first step all need each other: rank 0 may have failed because another one did.
        return cause({rank: code for rank, code in codes.items() if code}, reports(Path(logs)), time.time())


def _start(argv: Sequence[str], rank: int, processes: int, port: int, logs: Path) -> subprocess.Popen[bytes]:
    (logs / str(rank)).mkdir()
    place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
    place |= {"MASTER_PORT": port, LOCAL_LAUNCH: processes}
    environment = os.environ | {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    environment[ERROR_VARIABLE] = str(logs / str(rank) / "error.json")
    # Signals to the terminal's process group reach this launcher alone, which passes them on.
    return subprocess.Popen([sys.executable, "-m", "worldsize", *argv], env=environment, start_new_session=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(running: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Until rank 0 has ended, and then for the others. Returns the exit codes by rank."""
    running[0].wait()
    deadline = time.monotonic() + _LAST_WORDS_S
    for process in running[1:]:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return {rank: process.returncode for rank, process in enumerate(running)}


@contextmanager
def _passing_on_signals(running: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def pass_on(number: int, _: FrameType | None) -> None:
        for process in running:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
