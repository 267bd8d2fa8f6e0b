"""Metrics that are read one interval later lose nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from worldsize import cli
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import Diverged
from worldsize.parallel.base import Exchange
from worldsize.training import trainer
from worldsize.training.gradients import Computed
from worldsize.training.step_metrics import StepMetrics

CPU = torch.device("cpu")
NETWORK = """from torch import nn


def small(classes):
    layers = [nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes)]
    return nn.Sequential(*layers)
"""


class Alone:
    """The strategy of a test: nothing is sent."""

    local_gradients = False
    exchange = Exchange(CPU)


@pytest.fixture
def meter():
    world = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)
    meter = StepMetrics(world, BatchPlan(8, 8, 1), Alone(), deferred=True)
    yield meter
    meter.close()


def add(meter: StepMetrics, step: int) -> None:
    sums = torch.tensor([[8.0 * step, 4.0]], dtype=torch.float64)
    meter.add(step, 0.0, 0.1, Computed(sums, [step], [], []), torch.tensor(float(step)))


def test_each_interval_is_read_at_the_end_of_the_next_one(meter):
    add(meter, 1)
    add(meter, 2)
    assert meter.collect(5, rest=False) == ([], [])
    add(meter, 3)
    steps, (window,) = meter.collect(6, rest=False)
    assert [(s.step, s.loss, s.broken) for s in steps] == [(1, 1.0, 5), (2, 2.0, 5)]  # broken images as of their interval
    assert (window.step, window.steps) == (2, 2)
    add(meter, 4)
    steps, windows = meter.collect(7)
    assert [(s.step, s.broken) for s in steps] == [(3, 6), (4, 7)]
    assert [(w.step, w.steps) for w in windows] == [(3, 1), (4, 1)]
    assert meter.collect(7) == ([], [])


def test_an_interval_is_read_even_if_no_step_follows(meter):
    add(meter, 1)
    meter.collect(0, rest=False)
    assert [s.step for s in meter.collect(0, rest=False)[0]] == [1]


def train(folder: Path, *settings: str) -> int:
    network = folder / "small.py"
    network.write_text(NETWORK)
    command = (
        "train",
        "digits",
        "--model.name",
        f"{network}:small",
        "--precision",
        "fp32",
        "--name",
        "run",
        "--max-steps",
        "5",
    )
    return cli.main([*command, "--schedule.warmup-epochs", "0", *settings])


def recorded(folder: Path) -> tuple[list[tuple[int, float, float]], list[str]]:
    """The steps, and the checkpoints."""
    run = folder / "runs" / "run"
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [(r["step"], r["loss"], r["grad_norm"]) for r in lines if r["kind"] == "step"]
    return steps, sorted(path.name for path in (run / "checkpoints").iterdir())


CASES = {
    "collected at the end only": (("--track.every-seconds", "1000"), 0),
    "collected after each step": (("--track.every-seconds", "0"), 0),
    "diverges": (
        ("--track.every-seconds", "0", "--checkpoint.every-steps", "1", "--optimizer.lr", "1e30"),
        Diverged.exit_code,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_records_the_same_and_saves_nothing_that_is_not_finite(tmp_path, monkeypatch, case):
    settings, code = CASES[case]
    found = []
    for deferred in (False, True):
        monkeypatch.setattr(trainer, "StepMetrics", partial(deferring, deferred))
        folder = tmp_path / str(deferred)
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert train(folder, *settings) == code
        found.append(recorded(folder))
    assert found[0] == found[1]
    assert [step for step, _, _ in found[1][0]] == (list(range(1, 6)) if code == 0 else [1, 2])


def deferring(deferred: bool, *arguments: object) -> StepMetrics:
    return StepMetrics(*arguments[:-1], deferred)  # type: ignore[arg-type]
