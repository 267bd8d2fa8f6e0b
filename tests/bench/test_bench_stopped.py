"""A command that trains in another process, and is stopped or killed: the training ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eight_steps import EIGHT_STEP_BATCHES
from paths import SMALL_NETWORK
from processes import start_python
from waiting import until
from worldsize.launch.children import children
from worldsize.reproduce import training_process
from worldsize.watchdog.process import is_alive

STRATEGIES = ("bench", "strategies", "--procs", "2", "--steps", "999", "--batch", "4", "--size", "32", "--model", "resnet18")
SMALL = (*EIGHT_STEP_BATCHES, "--model.name", SMALL_NETWORK)
PROVE = ("prove", "digits", *SMALL, "--procs", "1,2", "--steps", "9999", "--epochs", "9999")


def below(pid: int) -> list[int]:
    """All processes that this one has started, and those that they have started."""
    found = children(pid)
    return found + [other for child in found for other in below(child)]


def training(tmp_path: Path, words: tuple[str, ...]) -> tuple[subprocess.Popen[str], list[int]]:
    """The command, with its processes, which train."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start_python(*words, cwd=tmp_path, TMPDIR=str(temporary))
    until(lambda: any(path.read_text() for path in tmp_path.rglob("metrics.jsonl")), "it trains", running=process)
    return process, below(process.pid)


def all_end(pids: list[int]) -> None:
    assert pids
    until(lambda: not any(map(is_alive, pids)), "the training has ended")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_benchmark_that_is_stopped_ends_its_training(tmp_path: Path, number: int):
    process, pids = training(tmp_path, STRATEGIES)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number and "stopped before its end; what was measured is kept" in said, said
    all_end(pids)  # the watchers a moment later
    assert list((tmp_path / "temporary").glob("worldsize-*")) == []


@pytest.mark.parametrize("words", [STRATEGIES, PROVE], ids=["bench", "prove"])
def test_the_training_of_a_command_that_is_killed_ends(tmp_path: Path, words: tuple[str, ...]):
    process, pids = training(tmp_path, words)
    process.kill()
    all_end(pids)


def test_a_command_returns_its_output_and_exit_code():
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = training_process.finished([sys.executable, "-c", program], env=dict(os.environ))
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
