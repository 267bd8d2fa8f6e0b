"""Asynchronous runs: workers that are slow, leave or die, and a run that loses no step because of it."""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections import Counter
from pathlib import Path

import pytest

import reference
from paths import SMALL_NETWORK
from processes import distance, identical, losses, momentum, newest, records, start_sabotaged, weights, worldsize
from waiting import all_end, until

ASYNC = ("--parallel.strategy", "async")


# 60 noise images, five steps per epoch, two micro-batches per step.
TINY = """
base: digits
epochs: 4
global_batch: 12
micro_batch: 6
precision: fp32
data: {name: synthetic, samples: 60, classes: 10}
model: {name: NETWORK}
schedule: {warmup_epochs: 0}
""".replace("NETWORK", SMALL_NETWORK)


@pytest.fixture(scope="module")
def train(ranks):
    """train(name, size, *arguments, ...) trains once and returns the run folder."""

    def run(name: str, size: int, *arguments: str, recipe: str = TINY, sabotage: str | None = None, code: int = 0) -> Path:
        (ranks.cwd / f"{name}.yaml").write_text(recipe)
        ranks(size, sabotage=sabotage).run("train", f"{name}.yaml", "--name", name, *arguments, code=code)
        return ranks.cwd / "runs" / name

    return run


def state(run: Path) -> dict:
    return json.loads((newest(run) / "state.json").read_text())


def each_step_counted_once(run: Path, total: int, applied: list[str]) -> None:
    assert Counter(map(int, applied)) == Counter(range(total))
    assert [record["step"] for record in records(run, "step")] == list(range(1, total + 1))
    assert (state(run)["step"], state(run)["missing"]) == (total, [])


# One worker


LARGE = "mobilenet_v3_small"  # with BatchNorm and dropout


@pytest.mark.parametrize(
    ("model", "clip"),
    [
        (SMALL_NETWORK, 0.5),
        pytest.param(LARGE, None, marks=pytest.mark.slow),
        pytest.param(LARGE, 0.5, marks=pytest.mark.slow),
    ],
)
def test_one_worker_is_the_plain_loop(train, model, clip):
    recipe = reference.RECIPE.format(precision="fp64", model=model)
    settings = ("--global-batch", "24", "--max-steps", "6", *(("--optimizer.clip-norm", str(clip)) if clip else ()))
    name = f"{Path(model).stem}-{clip}"
    single = train(f"single-{name}", 1, *settings, recipe=recipe)
    served = train(f"async-{name}", 1, *settings, *ASYNC, recipe=recipe)
    assert len(losses(single)) == 6
    assert losses(served) == losses(single)
    assert distance(weights(served), weights(single)) < 1e-12  # running statistics included
    assert distance(momentum(served), momentum(single)) < 1e-12
    assert max(record["grad_norm"] for record in records(single, "step")) > 0.5


UNUSED = """
from torch import nn

class Partly(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.used, self.unused = nn.Conv2d(3, classes, 4), nn.Conv2d(3, classes, 4)

    def forward(self, images):
        return self.used(images).mean((2, 3))

def build(classes):
    return Partly(classes)
"""


def test_parameters_without_a_gradient_stay_as_they_are(train, ranks):
    (ranks.cwd / "partly.py").write_text(UNUSED)
    recipe = TINY.replace(SMALL_NETWORK, "partly.py:build")
    single = train("partly-single", 1, "--max-steps", "6", recipe=recipe)
    served = train("partly-async", 1, "--max-steps", "6", *ASYNC, recipe=recipe)
    assert identical(weights(served), weights(single))
    assert identical(momentum(served), momentum(single))


def test_one_worker_resumes_bit_identically(train, ranks):
    """After a stop within an epoch, between an epoch's last step and its evaluation, and after the last evaluation."""
    expected = train("expected", 1, *ASYNC, "--max-steps", "12")
    parts = train("parts", 1, *ASYNC, "--max-steps", "10", sabotage="stopping", code=75)
    for stopped_after in (2, 5):
        assert newest(parts).name == f"step-{stopped_after:08}"
        ranks(1, sabotage="stopping").run("train", "--resume", parts, code=75 if stopped_after == 2 else 0)
    assert newest(parts).name == "step-00000010"
    ranks(1, sabotage="stopping").run("train", "--resume", parts, "--max-steps", "12")
    same_run(parts, expected)
    ranks(1).run("train", "--resume", parts, "--max-steps", "11")  # fewer than are done
    assert len(losses(parts)) == 12


PLAIN = ("epoch", "step", "train_loss", "train_top1", "val_loss", "val_top1", "val_top5", "val_samples")


def same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b)
    assert identical(weights(a), weights(b))
    assert identical(momentum(a), momentum(b))
    assert [[r[k] for k in PLAIN] for r in records(a, "epoch")] == [[r[k] for k in PLAIN] for r in records(b, "epoch")]


@pytest.mark.slow
def test_the_last_update_is_complete_when_the_run_ends(train):
    run = train("late", 2, *ASYNC, "--max-steps", "8", sabotage="long_last_update")
    assert [r["step"] for r in records(run, "step")] == list(range(1, 9))
    assert [r["step"] for r in records(run, "epoch")] == [5, 8]
    assert newest(run).name == "step-00000008"


def test_evaluating_and_saving_are_no_part_of_a_step(train):
    often = ("--checkpoint.every-steps", "2", "--max-steps", "10")
    run = train("hours", 1, *ASYNC, *often, sabotage="evaluations_of_an_hour")
    times = ("step_ms", "communication_ms", "data_ms", "compute_ms")
    assert max(record[name] for record in records(run, "step") for name in times) < 3_600_000
    assert json.loads((run / "result.json").read_text())["images_per_s"] > 10 * 12 / 3600


# One slow worker

SLOW_FROM, STEPS = 40, 130


@pytest.fixture(scope="module")
def slow(train, ranks):
    """slow(*arguments) returns a run in which the last of three workers becomes slow, and the applied steps."""
    found: dict[tuple, tuple[Path, list[str]]] = {}
    size = ("--data.samples", "240", "--global-batch", "4", "--micro-batch", "4", "--max-steps", str(STEPS))

    def run(*arguments: str) -> tuple[Path, list[str]]:
        if arguments not in found:
            log = ranks.cwd / "applied.txt"
            log.unlink(missing_ok=True)
            name = f"slow{len(found)}"
            options = (*ASYNC, *size, *arguments)
            folder = train(name, 3, *options, sabotage="one_slow_worker")
            found[arguments] = folder, log.read_text().split()
        return found[arguments]

    return run


def cycle_ms(steps: list[dict], worker: int) -> float:
    """The worker's median time from one gradient to the next."""
    return statistics.median(s["compute_ms"] + s["data_ms"] + s["communication_ms"] for s in steps if s["worker"] == worker)


@pytest.mark.slow
def test_a_slow_worker_does_not_slow_down_the_others(slow):
    run, applied = slow("--parallel.max-staleness", "30")
    each_step_counted_once(run, STEPS, applied)
    steps = records(run, "step")
    after = steps[SLOW_FROM + 10 :]
    # Worker 2 waits for 12 updates of the others, so they do not wait for it.
    assert all(s["staleness"] >= 12 for s in after if s["worker"] == 2 and s["step"] < STEPS - 15)
    for fast in (0, 1):
        assert cycle_ms(after, fast) < cycle_ms(after, 2) / 2
    updates = Counter(s["worker"] for s in after)
    assert 0 < updates[2] < min(updates[0], updates[1]) / 2


@pytest.mark.slow
def test_staleness_and_speed_are_recorded(slow):
    run, _ = slow("--parallel.max-staleness", "30")
    steps, epochs = records(run, "step"), records(run, "epoch")
    ages = Counter(s["staleness"] for s in steps)
    assert max(ages) <= 30
    assert max(s["staleness"] for s in steps if s["worker"] == 2) > 5
    assert epochs[-1]["staleness"] == [ages[age] for age in range(max(ages) + 1)]
    assert [sum(e["staleness"]) for e in epochs] == [e["step"] for e in epochs]  # others continue while rank 0 evaluates
    last = {s["worker"]: s["compute_ms"] + s["data_ms"] + s["communication_ms"] for s in steps}
    assert epochs[-1]["speeds"] == pytest.approx([4 / last[worker] * 1000 for worker in range(3)], rel=1e-3)
    assert {s["workers"] for s in steps} == {3}


@pytest.mark.slow
def test_a_gradient_that_is_too_old_is_dropped_and_its_step_repeated(slow):
    run, applied = slow("--parallel.max-staleness", "2")
    each_step_counted_once(run, STEPS, applied)
    last = records(run, "epoch")[-1]
    assert max(s["staleness"] for s in records(run, "step")) == len(last["staleness"]) - 1 == 2
    assert last["dropped"] > 3


def test_a_checkpoint_contains_the_evaluation_of_its_own_weights(train, ranks):
    run = train("evaluated", 3, *ASYNC, "--max-steps", "15")
    epochs = {e["step"]: e for e in records(run, "epoch")}
    saved = sorted((run / "checkpoints").iterdir())
    assert len(saved) >= 2
    for checkpoint in saved:
        kept = json.loads((checkpoint / "state.json").read_text())
        found = kept["evaluation"]
        assert kept["evaluated_step"] == kept["step"]
        assert found["top1"] == pytest.approx(epochs[kept["step"]]["val_top1"], rel=1e-6)
        output = ranks(1).run("eval", checkpoint)
        assert f"top-1 {found['top1']:.2%}, top-5 {found['top5']:.2%}, loss {found['loss']:.4f} on 60 images" in output


@pytest.mark.parametrize(("every", "best"), [("4", "--checkpoint.no-best"), ("2", "--checkpoint.best")])
def test_it_saves_at_the_end_of_every_epoch(train, every, best):
    """Exactly there, and the best state, which is saved once more, does not delete later ones."""
    often = ("--checkpoint.every-epochs", "1", "--checkpoint.history", "all", "--evaluate-every", every, best)
    run = train(f"epochs-{every}", 2, *ASYNC, *often)
    states = [json.loads((path / "state.json").read_text()) for path in sorted((run / "checkpoints").iterdir())]
    assert [(state["step"], state["epoch_step"]) for state in states] == [(5, 5), (10, 5), (15, 5), (20, 5)]


def test_it_saves_exactly_after_the_steps_that_the_recipe_asks_for(train):
    often = ("--checkpoint.every-steps", "3", "--checkpoint.history", "all", "--checkpoint.no-best", "--max-steps", "15")
    run = train("every-3", 3, *ASYNC, *often, sabotage="others_first")
    assert [sum(e["staleness"]) for e in records(run, "epoch")] == [5, 10, 15]  # not those after the evaluated step
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [f"step-{n:08}" for n in (3, 6, 9, 12, 15)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_number_formats(train, precision):
    settings = ("--precision", precision, "--device", "cpu", "--max-steps", "20")
    run = train(precision, 3, *ASYNC, *settings, sabotage="one_slow_worker")
    assert [record["step"] for record in records(run, "step")] == list(range(1, 21))
    assert state(run)["missing"] == []


# Workers that come and go

DIGITS = (
    *("digits", "--name", "a", "--procs", "3", "--model.name", "shufflenet_v2_x0_5", "--precision", "fp32", *ASYNC),
    *("--global-batch", "36", "--micro-batch", "18", "--optimizer.lr", "0.01", "--track.every-seconds", "0"),
)


def begin(cwd: Path, *arguments: str, rule: str = "recording_steps"):
    """Start `worldsize train` in the background; see `start_sabotaged`."""
    return start_sabotaged(rule, "train", *arguments, cwd=cwd)


def until_step(process, cwd: Path, step: int) -> None:
    log = cwd / "applied.txt"
    until(lambda: log.exists() and len(log.read_text().split()) >= step, f"{step} updates are applied", running=process)


def by_rank(launcher: int) -> dict[int, int]:
    """The process ids that a launcher started, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    environments = {int(pid): Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in children}
    return {int(word[5:]): pid for pid, words in environments.items() for word in words if word.startswith("RANK=")}


def applied(cwd: Path) -> list[str]:
    return (cwd / "applied.txt").read_text().split()


@pytest.mark.slow
def test_one_worker_is_killed_and_another_asked_to_leave(tmp_path):
    process = begin(tmp_path, *DIGITS, "--max-steps", "50")
    until_step(process, tmp_path, 10)
    pids = by_rank(process.pid)
    os.kill(pids[1], signal.SIGKILL)
    until_step(process, tmp_path, 25)
    os.kill(pids[2], signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert output.count("lost worker") == output.count("warning: lost worker 1 (") == 1
    assert "2 workers continue and take over its batches" in output
    run = tmp_path / "runs" / "a"
    each_step_counted_once(run, 50, applied(tmp_path))
    assert [records(run, "step")[i]["workers"] for i in (8, -1)] == [3, 1]
    assert records(run, "epoch")[-1]["speeds"][1:] == [0, 0]


@pytest.mark.slow
def test_a_worker_that_is_killed_before_training_begins_ends_the_run(tmp_path):
    process = begin(tmp_path, *DIGITS, rule="lost_while_connecting")
    output = process.communicate(timeout=240)[0]  # less than parallel.timeout_s, which the others would wait
    assert process.returncode == 128 + signal.SIGKILL, output
    assert "worldsize: rank 1 was killed by SIGKILL" in output


@pytest.mark.slow
def test_without_the_server_the_run_ends_and_resumes_from_its_last_checkpoint(tmp_path):
    process = begin(tmp_path, *DIGITS, "--max-steps", "30", "--checkpoint.every-steps", "5", "--track.every-seconds", "99")
    until_step(process, tmp_path, 12)
    # It is written in the background.
    until(lambda: list(tmp_path.glob("runs/a/checkpoints/step-????????")), "there is a checkpoint", running=process)
    pids = by_rank(process.pid)
    os.kill(pids[0], signal.SIGKILL)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 128 + signal.SIGKILL, output
    assert "worldsize: rank 0 was killed by SIGKILL" in output
    all_end(list(pids.values()))
    run = tmp_path / "runs" / "a"
    assert state(run)["step"] >= 5
    resumed = begin(tmp_path, "--resume", "runs/a")
    output = resumed.communicate(timeout=120)[0]
    assert resumed.returncode == 0, output
    assert [record["step"] for record in records(run, "step")] == list(range(1, 31))


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_worker_that_stands_still_does_not_hold_up_the_end(tmp_path, interrupted):
    process = begin(tmp_path, *DIGITS, "--max-steps", "25", rule="standing_still")
    until_step(process, tmp_path, 1)
    place = Path(f"/proc/{by_rank(process.pid)[1]}/stat")
    until(lambda: place.read_text().rpartition(")")[2].split()[0] == "T", "worker 1 is stopped", running=process)
    if interrupted:
        process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=240)[0]  # less than parallel.timeout_s
    assert process.returncode == (75 if interrupted else 0), output
    assert "warning: lost worker 1 (it has sent nothing for " in output
    run = tmp_path / "runs" / "a"
    done = len(applied(tmp_path))
    assert done == state(run)["step"] == len(losses(run))
    assert interrupted or state(run)["missing"] == []


@pytest.mark.slow
def test_a_failure_in_the_server_is_not_reported_as_a_lost_worker(tmp_path):
    process = begin(tmp_path, *DIGITS, rule="failing_update")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 70, output
    assert "RuntimeError: an update failed" in output
    assert "lost worker" not in output


@pytest.mark.slow
def test_a_stopped_run_resumes_with_fewer_workers_and_applies_each_step_once(tmp_path):
    process = begin(tmp_path, *DIGITS, "--max-steps", "45")
    until_step(process, tmp_path, 15)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 75, output
    assert "worldsize train --resume runs/a" in output
    run = tmp_path / "runs" / "a"
    done = len(applied(tmp_path))
    assert 15 <= done == state(run)["step"] == len(losses(run)) < 45
    resumed = begin(tmp_path, "--resume", "runs/a", "--procs", "2")
    output = resumed.communicate(timeout=120)[0]
    assert resumed.returncode == 0, output
    assert f"resuming after step {done}" in output
    each_step_counted_once(run, 45, applied(tmp_path))


@pytest.mark.slow
def test_three_workers_learn_the_digits(tmp_path):
    settings = ("--procs", "3", *ASYNC, "--model.name", "resnet18", "--name", "a")
    done = worldsize("train", "digits", *settings, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    assert records(tmp_path / "runs" / "a", "epoch")[-1]["val_top1"] > 0.95
