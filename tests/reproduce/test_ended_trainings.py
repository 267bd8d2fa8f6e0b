"""Commands that start trainings and that a signal ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paths import ENDED_NETWORK
from worldsize.reproduce import training_process

SMALL = ("--global-batch", "160", "--micro-batch", "40", "--precision", "fp32", "--model.name", ENDED_NETWORK)


@pytest.fixture(scope="module")
def finished(ranks) -> Path:
    """Eight steps and their checkpoint; do not modify."""
    ranks(1).run("train", "digits", *SMALL, "--epochs", "1", "--schedule.warmup-epochs", "0", "--name", "finished")
    return ranks.cwd / "runs" / "finished"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize(
    "words",
    [
        ("prove", "digits", *SMALL, "--procs", "1,2"),
        ("audit", None),
        ("replay", None, "--step", "8", "--from-start"),
        ("tune", "digits", *SMALL),
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_a_signal_ends_says_so(finished, fails, monkeypatch, tmp_path, words, number):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(training_process, "run", lambda *_: os.kill(os.getpid(), number))
    said = fails(*(word or finished for word in words), code=128 + number)
    assert said == "worldsize: stopped before its end, without a result\n"
    assert list(temporary.iterdir()) == [] and list(tmp_path.iterdir()) == [temporary]
