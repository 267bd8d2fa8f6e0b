"""The strategy `bitwise`: the same bits at every world size, under every launcher, through interruptions."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import reference
from paths import SMALL_NETWORK
from processes import Forked, bits, environment, numbers, records, start, weights, workers, worldsize
from waiting import until

SLOW = pytest.mark.slow
SMALL = SMALL_NETWORK
ADAMW = "{name: adamw, lr: 0.0005, clip_norm: 1.0, nesterov: false}"


def recipe(cwd: Path, precision: str = "fp32", model: str = "resnet18", micro_batch: int = 12, optimizer: str = "") -> Path:
    """The recipe of `reference`, with the strategy bitwise; M = 48 / micro_batch."""
    text = reference.RECIPE.format(precision=precision, model=model)
    lines = [line for line in text.splitlines() if not line.startswith(("micro_batch:", *["optimizer:"] * bool(optimizer)))]
    lines += [f"micro_batch: {micro_batch}", "parallel: {strategy: bitwise}", *[f"optimizer: {optimizer}"] * bool(optimizer)]
    path = cwd / f"{precision}-{Path(model).name}-{micro_batch}{'-adamw' * bool(optimizer)}.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def runs(ranks):
    """runs(size, sabotage=..., **settings of `recipe`) trains once and returns the run folder."""
    finished: dict[tuple, Path] = {}

    def run(size: int, sabotage: str | None = None, **settings) -> Path:
        key = (size, sabotage, *settings.items())
        if key not in finished:
            name = f"run-{len(finished)}"
            ranks(size, sabotage=sabotage).run("train", recipe(ranks.cwd, **settings), "--name", name)
            finished[key] = ranks.cwd / "runs" / name
        return finished[key]

    return run


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"model": SMALL}),
        (4, {"model": SMALL}),
        pytest.param(2, {}, marks=SLOW),
        pytest.param(4, {}, marks=SLOW),
        pytest.param(2, {"model": "shufflenet_v2_x0_5"}, marks=SLOW),
        pytest.param(4, {"model": "shufflenet_v2_x0_5"}, marks=SLOW),
        pytest.param(2, {"model": SMALL, "micro_batch": 8}, marks=SLOW),  # the ranks' nodes: 2 and 1 micro-batches, 1 and 2
        pytest.param(3, {"model": SMALL, "micro_batch": 4}, marks=SLOW),
        pytest.param(4, {"model": SMALL, "micro_batch": 4}, marks=SLOW),
        pytest.param(8, {"model": SMALL, "micro_batch": 6}, marks=SLOW),
        pytest.param(2, {"model": SMALL, "precision": "bf16"}, marks=SLOW),
        pytest.param(2, {"model": SMALL, "precision": "fp16"}, marks=SLOW),
        pytest.param(2, {"model": SMALL, "optimizer": ADAMW}, marks=SLOW),
        pytest.param(2, {"model": "mobilenet_v3_small"}, marks=SLOW),  # has dropout
        pytest.param(2, {"model": "squeezenet1_1"}, marks=SLOW),  # has no BatchNorm
        pytest.param(2, {"model": "resnet50"}, marks=SLOW),
        pytest.param(4, {"model": "resnet50"}, marks=SLOW),
    ],
)
def test_the_world_size_changes_no_bit(runs, size, settings):
    single, distributed = runs(1, **settings), runs(size, **settings)
    assert numbers(distributed) == numbers(single)
    assert bits(distributed) == bits(single)


@SLOW
def test_it_computes_the_numbers_of_a_single_process(runs, ranks):
    """Up to the rounding of the first steps."""
    ranks(1).run("train", recipe(ranks.cwd), "--parallel.strategy", "single", "--name", "single")
    expected = [step["loss"] for step in records(ranks.cwd / "runs" / "single", "step")]
    assert [step["loss"] for step in records(runs(2), "step")][:8] == pytest.approx(expected[:8], rel=1e-5)


@pytest.mark.parametrize(
    ("rule", "size"),
    [
        ("from_left_to_right", 1),
        pytest.param("mean_before_sum", 2, marks=SLOW),
        pytest.param("statistics_averaged_when_saved", 2, marks=SLOW),
    ],
)
def test_each_rule_is_needed(runs, rule, size):
    """With one rule broken the weights differ, so the comparison above detects it."""
    settings = {"model": SMALL, "micro_batch": 12 if size == 1 else 8}
    assert bits(runs(size, sabotage=rule, **settings)) != bits(runs(3 - size, **settings))


def test_a_process_sends_as_much_as_in_a_ring_all_reduce(runs):
    tensors = {name: t for name, t in weights(runs(2, model=SMALL)).items() if not name.endswith("num_batches_tracked")}
    gradient, statistics = (
        sum(t.numel() * t.element_size() for name, t in tensors.items() if name.endswith(("_mean", "_var")) == statistic)
        for statistic in (False, True)
    )
    marks = 4 * sum(not name.endswith(("_mean", "_var")) for name in tensors)  # whether a rank has reached a parameter
    for size in (2, 4):
        sent = records(runs(size, model=SMALL), "step")[-1]["sent_bytes"]
        assert sent == pytest.approx(gradient + statistics + marks, rel=0.001)
    assert statistics < 0.05 * gradient


@SLOW
@pytest.mark.parametrize("launcher", ["procs", "torchrun", "mpirun"])
def test_every_launcher_gives_the_same_bits(runs, tmp_path, launcher):
    command = ["-m", "worldsize", "train", str(recipe(tmp_path)), "--name", "a"]
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("needs mpirun (Debian: openmpi-bin)")
    words = {
        "procs": [sys.executable, *command, "--procs", "2"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, *command],
    }
    done = subprocess.run(
        words[launcher], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert bits(tmp_path / "runs" / "a") == bits(runs(1))


def test_stops_at_changing_world_sizes_change_no_bit(runs, ranks):
    """Two processes, then one, then four."""
    run = ranks.cwd / "runs" / "stopped"
    ranks(2).run("train", recipe(ranks.cwd, model=SMALL), "--name", run.name, "--stop-after", "4", code=75)
    ranks(1).run("train", "--resume", run, "--stop-after", "9", code=75)
    ranks(4).run("train", "--resume", run)
    assert numbers(run) == numbers(runs(1, model=SMALL))
    assert bits(run) == bits(runs(1, model=SMALL))


@SLOW
def test_interruptions_at_changing_world_sizes_change_no_bit(runs, tmp_path):
    """Two processes until kill -9, one until SIGTERM, four to the end."""
    run, save = tmp_path / "runs" / "a", ("--checkpoint.every-steps", "1")
    first = start("train", recipe(tmp_path), "--name", "a", "--procs", "2", *save, cwd=tmp_path)
    reached = wait_for_two_steps(first, run)
    os.kill(random.Random(0).choice(workers(first.pid)), signal.SIGKILL)
    first.communicate(timeout=240)
    second = start("train", "--resume", run, *save, cwd=tmp_path)
    assert wait_for_two_steps(second, run) > reached
    second.send_signal(signal.SIGTERM)
    assert second.communicate(timeout=240) and second.returncode == 75
    last = worldsize("train", "--resume", run, "--procs", "4", cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    assert numbers(run) == numbers(runs(1))
    assert bits(run) == bits(runs(1))


def wait_for_two_steps(process: Forked, run: Path) -> int:
    """Wait until the process has saved two more steps; returns the last step's number, before the end."""
    before = saved(run)
    until(lambda: saved(run) >= before + 2, "two more steps are saved", running=process)
    assert saved(run) < 10
    return saved(run)


def saved(run: Path) -> int:
    steps = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-????????")]
    return max(steps, default=0)
