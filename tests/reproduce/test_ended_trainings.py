"""A training that a command starts and that ends too early: no verdict, a message that says why, and its exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from eight_steps import EIGHT_STEP_BATCHES
from full_disk import files_up_to
from paths import ENDED_NETWORK
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.reproduce import scratch_runs, training_process
from worldsize.reproduce.training_process import ComputationFailed

SMALL = (*EIGHT_STEP_BATCHES, "--model.name", ENDED_NETWORK)
AGAIN = "the training was stopped after step {} of {}: there is no verdict, so run the same command again"


@pytest.fixture(scope="module")
def finished(ranks) -> Path:
    """Eight steps and their checkpoint; do not modify."""
    ranks(1).run("train", "digits", *SMALL, "--epochs", "1", "--schedule.warmup-epochs", "0", "--name", "finished")
    return ranks.cwd / "runs" / "finished"


def test_a_proof_with_a_stopped_training_has_no_verdict(fails, monkeypatch):
    monkeypatch.setenv("EARLY_SIGNAL", "SIGTERM")
    said = fails("prove", "digits", *SMALL, "--procs", "1,2", "--steps", "8", code=75)
    assert re.search(AGAIN.format(r"\d", 8), said)


@pytest.mark.parametrize("words", [("audit",), ("replay", "--step", "7", "--from-start")])
def test_a_run_is_not_called_inconsistent_because_a_training_was_stopped(finished, fails, monkeypatch, words):
    monkeypatch.setenv("EARLY_SIGNAL", "SIGTERM")
    said = fails(words[0], finished, *words[1:], code=75)
    assert re.search(AGAIN.format(r"\d", {"audit": 8, "replay": 7}[words[0]]), said)


def test_a_killed_training_is_named_with_the_likely_cause(fails, monkeypatch):
    monkeypatch.setenv("EARLY_SIGNAL", "SIGKILL")
    said = fails("prove", "digits", *SMALL, "--procs", "1,2", "--steps", "8", code=137)
    assert said == "worldsize: the training was killed by SIGKILL; a likely cause is the kernel's out-of-memory killer\n"


@pytest.mark.parametrize(
    ("ended", "said", "steps", "code", "message"),
    [
        (75, "worldsize: stopped after step 3 of 9", 3, 75, AGAIN.format(3, 5)),
        (75, "", 0, 75, "the training was stopped before its first step: there is no verdict"),
        (75, "warning: no space\nworldsize: stopped", 3, 75, AGAIN.format(3, 5) + "\nwarning: no space"),
        (-15, "", 0, 143, "the training was stopped by SIGTERM before its first step: there is no verdict"),
        (143, "stopping after this step; send", 3, 143, "the training was stopped by SIGTERM after step 3 of 5"),
        (129, "", 0, 129, "the training was stopped by SIGHUP before its first step"),
        (-9, "", 3, 137, "the training was killed by SIGKILL; a likely cause is the kernel's out-of-memory killer"),
        (-11, "Fatal Python error", 3, 139, "the training was killed by SIGSEGV\nFatal Python error"),
        (137, "worldsize: rank 1 was killed by SIGKILL", 3, 137, "rank 1 was killed by SIGKILL"),
        (76, "worldsize: the loss is nan", 3, 76, "the loss is nan"),
        (3, "", 3, 3, "worldsize train recipe.yaml --procs 1 --stop-after 5 failed"),
    ],
)
def test_what_is_said_of_a_training_that_ends_too_early(tmp_path, monkeypatch, ended, said, steps, code, message):
    monkeypatch.setattr(training_process, "run", lambda *_: (ended, said))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f'{{"kind": "step", "step": {step}}}\n' for step in range(1, steps + 1)))
    with pytest.raises(ComputationFailed) as raised:
        training_process.train(["recipe.yaml"], metrics, 1, 5)
    assert raised.value.exit_code == code and str(raised.value).startswith(message)


@pytest.mark.parametrize(("ended", "steps"), [(75, 5), (0, 5), (0, 4)])
def test_a_training_that_reaches_its_step_or_its_end_counts(tmp_path, monkeypatch, ended, steps):
    monkeypatch.setattr(training_process, "run", lambda *_: (ended, ""))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(f'{{"kind": "step", "step": {steps}}}\n')
    training_process.train(["recipe.yaml"], metrics, 1, 5)


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


def test_a_folder_without_room_for_a_recipe_is_named(tmp_path):
    path = tmp_path / "again.yaml"
    with files_up_to(16), pytest.raises(UserError, match=r"again\.yaml \(.*\): choose another folder .* with TMPDIR"):
        scratch_runs.write_recipe(Recipe(), path)


def test_bytes_that_are_no_text_are_shown_as_escapes(tmp_path):
    write = (sys.executable, "-c", "import os; os.write(1, b'a\\xff'); os.write(2, b'b\\xfe')")
    done = training_process.finished(write)
    assert (done.stdout, done.stderr) == ("a\\xff", "b\\xfe")
