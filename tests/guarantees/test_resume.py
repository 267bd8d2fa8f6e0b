"""Interrupting a run in every way and resuming it: no step lost or repeated, and bit-identical results."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from interruptions import SETTINGS, STEPS, same_run, start_until
from paths import SMALL_NETWORK
from processes import distance, identical, losses, newest, records, start_sabotaged, weights, workers
from waiting import until


@pytest.fixture(scope="module")
def train(ranks):
    """train(name, procs, ...) runs a training from start to end and returns its folder."""

    def run(name: str, procs: int, *more: str) -> Path:
        ranks(procs).run("train", "digits", *SETTINGS, "--name", name, *more)
        return ranks.cwd / "runs" / name

    return run


@pytest.fixture(scope="module")
def resume(ranks):
    """resume(run, procs, ...) resumes a run until its end and returns the output."""

    def resume_run(run: Path, procs: int, *more: str, code: int = 0) -> str:
        return ranks(procs).run("train", "--resume", run, *more, code=code)

    return resume_run


@pytest.fixture(scope="module")
def uninterrupted(ranks, train):
    """uninterrupted(procs) runs without interruption and returns the folder."""

    def run(procs: int) -> Path:
        path = ranks.cwd / "runs" / f"uninterrupted{procs}"
        return path if path.exists() else train(path.name, procs)

    return run


@pytest.mark.parametrize(
    ("procs", "number"),
    [
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
        (2, signal.SIGTERM),
        pytest.param(2, signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(4, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_loses_no_step_and_no_bit(tmp_path, resume, uninterrupted, procs, number):
    process = start_until(tmp_path, "a", procs, step=random.Random(procs).randint(2, STEPS // 2))
    process.send_signal(number)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 75, output
    assert "worldsize train --resume runs/a" in output
    run = tmp_path / "runs" / "a"
    assert newest(run).name == f"step-{len(losses(run)):08d}"
    resume(run, procs)
    same_run(run, uninterrupted(procs))


@pytest.mark.parametrize("procs", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_kill_9_of_a_rank_costs_only_the_steps_since_the_last_checkpoint(tmp_path, resume, uninterrupted, procs):
    process = start_until(tmp_path, "a", procs, 13, "--checkpoint.every-steps", "5")
    victim = random.Random(procs).choice(workers(process.pid))
    os.kill(victim, signal.SIGKILL)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 128 + signal.SIGKILL, output
    assert "was killed by SIGKILL" in output
    run = tmp_path / "runs" / "a"
    assert int(newest(run).name.removeprefix("step-")) >= 5
    resume(run, procs)
    same_run(run, uninterrupted(procs))


def test_an_evaluation_after_the_last_checkpoint_is_recorded_once(tmp_path, resume, uninterrupted):
    """The checkpoint at the end of an epoch comes before the evaluation, which the resumed run makes again."""
    run, saves = tmp_path / "runs" / "a", ("--checkpoint.every-epochs", "1", "--checkpoint.no-best")
    process = start_until(tmp_path, "a", 2, 10, *saves)
    until(lambda: list(run.glob("checkpoints/step-00000009")), "a checkpoint is on disk", running=process)
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    process.communicate(timeout=240)
    assert records(run, "epoch")[0]["step"] == 9
    resume(run, 2)
    assert [epoch["step"] for epoch in records(run, "epoch")] == [9, 18, 27]
    same_run(run, uninterrupted(2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kill_9_at_random_steps(tmp_path, resume, uninterrupted, seed):
    dice = random.Random(seed)
    process = start_until(tmp_path, "a", 2, dice.randint(1, STEPS // 2), "--checkpoint.every-steps", str(dice.randint(1, 7)))
    os.kill(dice.choice(workers(process.pid)), signal.SIGKILL)
    process.communicate(timeout=240)
    resume(tmp_path / "runs" / "a", 2)
    same_run(tmp_path / "runs" / "a", uninterrupted(2))


@pytest.mark.slow
def test_checkpoints_by_the_clock_change_no_number(tmp_path, resume, uninterrupted):
    process = start_until(tmp_path, "a", 2, 13, "--checkpoint.every-seconds", "0.001")
    run = tmp_path / "runs" / "a"
    until(lambda: list(run.glob("checkpoints/step-????????")), "a checkpoint is on disk", running=process)
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    process.communicate(timeout=240)
    resume(run, 2)
    same_run(run, uninterrupted(2))


@pytest.mark.parametrize(("model", "steps"), [(SMALL_NETWORK, 2), pytest.param("resnet18", 4, marks=pytest.mark.slow)])
def test_another_world_size_goes_on_within_rounding(train, resume, model, steps):
    # Not the model of the other tests: some of its channels are constant, so rounding decides the sign that ReLU sees.
    smooth = ("--model.name", model, "--precision", "fp64", "--optimizer.lr", "0.002")
    run = train(f"moving-{steps}", 2, *smooth, "--max-steps", str(steps))
    resume(run, 1, "--max-steps", str(2 * steps))
    resume(run, 4, "--max-steps", str(3 * steps))
    expected = train(f"staying-{steps}", 2, *smooth, "--max-steps", str(3 * steps))
    assert losses(run) == pytest.approx(losses(expected), rel=1e-6)
    assert distance(weights(run), weights(expected)) < 1e-9


def test_a_second_signal_exits_immediately(tmp_path):
    process = start_sabotaged("endless_step", "train", "digits", *SETTINGS, "--name", "a", cwd=tmp_path)
    until((tmp_path / "in-step").exists, "the first step has begun", running=process)
    process.send_signal(signal.SIGINT)
    while "stopping after this step" not in (line := process.stdout.readline()):
        assert line, process.wait(240)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert process.returncode == 130


def test_a_finished_run_has_nothing_left_to_do(resume, uninterrupted):
    run = uninterrupted(1)
    before = newest(run)
    assert resume(run, 1).rstrip().endswith("has already reached its last step; nothing to do")
    limited = resume(run, 1, "--max-steps", "5")
    assert "reached its last step (it ends at --max-steps 5; --max-steps None trains all epochs); nothing to do" in limited
    assert newest(run) == before


def test_a_finished_run_that_goes_on_has_no_result_until_it_ends_again(train, resume):
    run = train("again", 1, "--max-steps", "2")
    resume(run, 1)
    assert json.loads((run / "result.json").read_text())["steps"] == 2
    resume(run, 1, "--max-steps", "4", "--stop-after", "3", code=75)
    assert not (run / "result.json").exists()
    resume(run, 1)
    assert json.loads((run / "result.json").read_text())["steps"] == 4


@pytest.mark.slow
def test_a_finished_run_can_be_extended(train, resume, uninterrupted):
    run = train("longer", 1, "--max-steps", "5")
    resume(run, 1, "--max-steps", str(STEPS))
    assert identical(weights(run), weights(uninterrupted(1)))
    assert losses(run) == losses(uninterrupted(1))


def test_a_batch_per_process_cannot_resume_at_another_world_size(train, resume):
    run = train("growing", 2, "--per-process-batch", "24", "--max-steps", "2")
    assert "has a global batch of 48 and cannot continue with 24" in resume(run, 1, "--max-steps", "4", code=64)
    resume(run, 2, "--max-steps", "4")


@pytest.mark.slow
def test_a_signal_to_the_whole_process_tree_is_one_signal(tmp_path):
    process = start_until(tmp_path, "a", 2, 5, rule="long_echo")
    for pid in workers(process.pid):
        os.kill(pid, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 75, output
    assert newest(tmp_path / "runs" / "a").name == f"step-{len(losses(tmp_path / 'runs' / 'a')):08d}"


def test_a_changed_recipe_is_refused_with_the_setting_unless_allowed(train, resume):
    run = train("changed", 1, "--max-steps", "3")
    more = ("--max-steps", "5", "--optimizer.lr", "0.02")
    assert "optimizer.lr: was 0.01, is 0.02" in resume(run, 1, *more, code=64)
    assert len(losses(run)) == 3
    resume(run, 1, *more, "--allow-changes")
    assert len(losses(run)) == 5


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_skipped(train, resume, uninterrupted):
    often = ("--checkpoint.every-steps", "4", "--checkpoint.keep", "3", "--checkpoint.no-best")
    run = train("damaged", 1, *often, "--max-steps", "10")
    with open(newest(run) / "optimizer.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x55")
    printed = resume(run, 1, "--max-steps", str(STEPS))
    assert "optimizer.safetensors is damaged" in printed
    assert "resuming after step 8" in printed
    assert identical(weights(run), weights(uninterrupted(1)))
    assert losses(run) == losses(uninterrupted(1))


@pytest.mark.slow
def test_the_loss_scale_of_fp16_is_resumed(train, resume):
    settings = ("--precision", "fp16", "--device", "cpu", "--no-deterministic")
    run = train("scaled", 1, *settings, "--max-steps", "3")
    before = json.loads((newest(run) / "state.json").read_text())["scaler"]
    assert before["_growth_tracker"] + (before["scale"] < 2**16) > 0
    resume(run, 1, "--max-steps", "5")
    expected = train("scaled-expected", 1, *settings, "--max-steps", "5")
    assert (
        json.loads((newest(run) / "state.json").read_text())["scaler"]
        == json.loads((newest(expected) / "state.json").read_text())["scaler"]
    )
    assert identical(weights(run), weights(expected))


@pytest.mark.slow
@pytest.mark.parametrize("procs", [1, 2])
def test_a_compiled_run_resumes_and_equals_one_of_single_kernels(train, resume, procs, tmp_path):
    """Micro-batches that share a forward pass have other code for BatchNorm there."""
    (tmp_path / "small.py").write_text(NETWORK)
    small = ("--model.name", f"{tmp_path}/small.py:small", "--micro-batch", "8", "--forward-batch", "16")
    small = (*small, "--global-batch", "32", "--no-deterministic", "--precision", "fp64", "--model.compile")
    run = train(f"part-compiled-{procs}", procs, *small, "--max-steps", "2")
    resume(run, procs, "--max-steps", "4")
    plain = train(f"plain-{procs}", 1, *small, "--model.no-compile", "--max-steps", "4")
    assert losses(run) == pytest.approx(losses(plain), rel=1e-9)
    assert distance(weights(run), weights(plain)) < 1e-9
    assert json.loads((run / "environment.json").read_text())["compiled"]


NETWORK = """from torch import nn


def small(classes):
    layers = [nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
"""


@pytest.mark.slow
def test_a_compiled_model_trains_as_a_plain_one_and_its_checkpoint_has_plain_names(train):
    small = ("--model.name", "resnet18", "--max-steps", "2", "--no-deterministic", "--precision", "fp64")
    run, plain = train("compiled", 1, "--model.compile", *small), train("not-compiled", 1, *small)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-9)
    assert distance(weights(run), weights(plain)) < 1e-9
    assert "layer1.0.conv1.weight" in weights(run)
    assert not [name for name in weights(run) if "_orig_mod" in name]
