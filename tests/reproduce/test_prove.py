"""Proving that the world size changes nothing: `worldsize prove`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from processes import start_python, workers, worldsize
from waiting import until
from worldsize.config import recipe_files
from worldsize.errors import UserError
from worldsize.reproduce import prove, scratch_runs
from worldsize.reproduce.scratch_runs import Steps
from worldsize.watchdog.process import is_alive


@pytest.mark.slow
def test_prove_finds_equal_bits_and_names_the_difference_of_other_strategies(tmp_path):
    small = ("--model.name", "shufflenet_v2_x0_5", "--steps", "4", "--procs", "1,2", "--precision", "fp32")
    done = worldsize("prove", "digits", *small, "--interrupt", "--against", "torch", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The promise of bitwise holds: the same bits" in done.stdout
    hashes = re.findall(r"\b[0-9a-f]{16}\b", done.stdout)
    assert len(hashes) == 2 and len(set(hashes)) == 1
    loss, weights = re.search(r"plain PyTorch loop .* by (\S+) in the loss .* by (\S+) in the weights", done.stdout).groups()
    assert float(loss) < 1e-5 and float(weights) < 1e-3
    done = worldsize("prove", "digits", *small, "--strategy", "ddp", cwd=tmp_path)
    assert "The promise of ddp holds: the same numbers up to rounding" in done.stdout, done.stdout + done.stderr
    assert re.search(
        r"2 processes: first differs in step \d, most in .*likely cause", done.stdout, re.DOTALL | re.IGNORECASE
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (("prove", "digits", "--procs", "2,1", "--steps", "1000"), [signal.SIGINT]),
        (("prove", "digits", "--procs", "2,1", "--steps", "1000"), [signal.SIGTERM]),
        (("prove", "digits", "--procs", "2,1", "--steps", "1000"), [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]),
        (("tune", "digits", "--procs", "2", "--steps", "1000"), [signal.SIGTERM]),
    ],
)
def test_an_interrupted_command_leaves_nothing_behind(tmp_path, words, numbers):
    temporary = tmp_path / "temporary"
    process = start_until_first_step(words, tmp_path, temporary)
    assert len(users(temporary)) >= 2  # the launcher, its two workers
    for number in numbers:
        process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode in [128 + number for number in numbers], said
    assert said.endswith("worldsize: stopped before its end, without a result\n")
    # The workers have ended by now; their watchers do when they notice it.
    until(lambda: users(temporary) == [], "the watchers have ended")
    # Importing torch creates its compiler's cache.
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")] == []


@pytest.mark.slow
def test_an_interrupted_command_ends_a_frozen_launcher_and_its_workers(tmp_path):
    temporary = tmp_path / "temporary"
    process = start_until_first_step(("prove", "digits", "--procs", "2,1", "--steps", "1000"), tmp_path, temporary)
    [launcher] = workers(process.pid)
    pids = workers(launcher)
    for pid in (launcher, pids[1]):
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert said.endswith("worldsize: stopped before its end, without a result\n")
    assert len(pids) == 2 and [pid for pid in (launcher, *pids) if is_alive(pid)] == []


def start_until_first_step(words: Sequence[str], cwd: Path, temporary: Path) -> subprocess.Popen[str]:
    """Start a command with this folder for temporary files, and wait until its first training has done a step."""
    temporary.mkdir()
    process = start_python(*words, cwd=cwd, TMPDIR=str(temporary))
    until(
        lambda: any(path.stat().st_size for path in temporary.rglob("metrics.jsonl")),
        "the first step is done", 300, running=process,
    )  # fmt: skip
    return process


def users(folder: Path) -> list[str]:
    """The command lines of the processes that name the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            found += [line] * (str(folder) in line)
    return found


def test_prove_shares_the_batch_with_the_largest_micro_batch_that_fits():
    told: list[str] = []
    recipe = recipe_files.load("digits")
    assert prove.recipe_for_sizes([1, 2], recipe, told.append).micro_batch == 32 and told == []
    assert prove.recipe_for_sizes([1, 2, 4], recipe, told.append).micro_batch == 16
    assert "micro-batches of 16 instead of 32" in told[0]
    with pytest.raises(UserError, match="pass a --global-batch that is a multiple of 3"):
        prove.recipe_for_sizes([1, 3], recipe, told.append)


@pytest.mark.parametrize("text", ["", "2", "1,1", "0,1", "1,two"])
def test_prove_needs_two_world_sizes(text):
    with pytest.raises(UserError, match="at least two numbers of processes"):
        prove.world_sizes(text)


def steps(**numbers: float | None) -> Steps:
    return Steps([{"step": 1, "samples": "ab", "lr": 0.1, "top1": 0.5, "loss": 1.0, "grad_norm": 2.0} | numbers], Path())


@pytest.mark.parametrize(
    ("one", "other", "agrees"),
    [
        ({}, {"loss": 1 + 1e-6}, True),
        ({}, {"loss": 1.1}, False),
        ({"grad_norm": None}, {"grad_norm": None}, True),  # fp16: the first loss scale is often too high
        ({"grad_norm": None}, {}, True),
        ({"grad_norm": None}, {"loss": 1.1}, False),
    ],
)
def test_a_first_step_that_overflows_is_compared_as_far_as_it_has_numbers(one, other, agrees):
    assert prove._first_step_agrees(steps(**one), steps(**other), 1e-4) == agrees


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "0"), "--steps 0: must be at least 1"),
        (("--steps", "1", "--interrupt"), "--interrupt stops a run between two of its steps: pass --steps 2 (or more)"),
        (("--max-steps", "0"), "the recipe has no steps, so nothing can be proved: pass --max-steps 1 (or more)"),
        (("--max-steps", "1", "--interrupt"), "--interrupt stops a run between two of its steps, and the recipe has 1"),
        (("--strategy", "async"), "strategy async cannot be proved: the order of its updates depends on time"),
    ],
)
def test_what_would_prove_nothing_is_refused_before_the_first_run(fails, monkeypatch, words, message):
    monkeypatch.setattr(scratch_runs, "train", lambda *arguments: pytest.fail("it trains"))
    assert message in fails("prove", "digits", *words)


@pytest.mark.parametrize(("words", "first"), [((), 10), (("--max-steps", "4"), 2), (("--global-batch", "1400"), 3)])
def test_a_run_is_interrupted_in_the_middle_of_the_steps_that_it_has(fails, monkeypatch, words, first):
    def train(recipe, out, name, procs, until):
        raise UserError(f"to step {until}")

    monkeypatch.setattr(scratch_runs, "train", train)
    asked = ("--micro-batch", "4", "--epochs", "7", "--steps", "20", "--interrupt", *words)
    assert f"to step {first}\n" in fails("prove", "digits", *asked)
