"""Averaged weights equal those of torch and timm, and those of a plain computation over a run's own checkpoints."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import timm.utils
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import swa_utils

from paths import SMALL_NETWORK
from processes import average_of, identical, records
from worldsize import parallel
from worldsize.config.recipe import Average, Recipe
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models.factory import RunningStatistics
from worldsize.optim import averaging
from worldsize.optim.averaging import Averaging

CPU = torch.device("cpu")
ALONE = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)
SETTINGS = (
    *("--data.name", "synthetic", "--data.samples", "96", "--data.classes", "10", "--epochs", "3"),
    *("--model.name", SMALL_NETWORK, "--global-batch", "16", "--micro-batch", "4", "--deterministic"),
    *("--optimizer.lr", "0.002", "--track.every-seconds", "0"),
)
EMA = ("--average.name", "ema", "--average.decay", "0.9", "--average.every-steps", "2", "--average.start-epoch", "0.5")


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def move(model: nn.Module) -> None:
    """A step of some optimizer."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_the_average_has_the_bits_of_torchs(name):
    model = network()
    ours = Averaging(Average(name=name, decay=0.75), model, RunningStatistics(model), steps_per_epoch=1)
    function = swa_utils.get_ema_multi_avg_fn(0.75) if name == "ema" else swa_utils.get_swa_multi_avg_fn()
    theirs = swa_utils.AveragedModel(model, multi_avg_fn=function)
    for step in range(1, 30):
        move(model)
        ours.after_step(step)
        theirs.update_parameters(model)
    kept = copy.deepcopy(model)
    with ours.applied(ALONE):
        for own, other in zip(model.parameters(), theirs.module.parameters(), strict=True):
            assert torch.equal(own, other)
        assert not torch.equal(model[0].weight, kept[0].weight)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept.parameters(), strict=True))


@pytest.mark.parametrize("warmup", [True, False])
def test_the_decay_is_timms(warmup):
    theirs = timm.utils.ModelEmaV3(nn.Linear(1, 1), decay=0.98, use_warmup=warmup)
    settings = Average(name="ema", decay=0.98, warmup=warmup)
    for step in range(1, 1000):
        assert averaging.weight(settings, step, 10) == pytest.approx(1 - theirs.get_decay(step))


def test_weights_enter_every_n_steps_from_the_start_on():
    settings = Average(name="ema", decay=0.9, every_steps=4, start_epoch=1.5)  # step 15
    weights = {step: averaging.weight(settings, step, 10) for step in range(1, 25)}
    entered = {step: weight for step, weight in weights.items() if weight is not None}
    assert entered == {16: 1, 20: pytest.approx(0.1), 24: pytest.approx(0.1)}


def test_until_weights_enter_it_the_average_is_a_copy_of_them():
    model = network()
    statistics = RunningStatistics(model)
    ours = Averaging(Average(name="ema", decay=0.5, every_steps=4), model, statistics, steps_per_epoch=10)
    for step in range(1, 9):
        move(model)
        statistics.advance(torch.full((8,), float(step)))
        ours.after_step(step)
        own, kept = ours.own()["statistics"].clone(), copy.deepcopy(model)
        with ours.applied(ALONE):
            same = torch.equal(model[0].weight, kept[0].weight)
        assert (same, torch.equal(own, statistics.current)) == ((step <= 4),) * 2


def test_an_average_that_nothing_would_enter_is_refused():
    settings = Average(name="ema", every_steps=21)
    averaging.check(settings, epochs=3, steps_per_epoch=7)
    with pytest.raises(UserError, match=r"every_steps 21 .* nothing would be averaged in the run's 14 steps"):
        averaging.check(settings, epochs=2, steps_per_epoch=7)


def test_swa_is_the_mean_of_the_last_epochs():
    settings = Average(name="swa", start_epoch=2)
    weights = {step: averaging.weight(settings, step, 10) for step in range(1, 51)}
    assert {step: weight for step, weight in weights.items() if weight is not None} == {
        30: 1,
        40: 1 / 2,
        50: 1 / 3,
    }


def test_the_saved_average_is_that_of_the_saved_weights(ranks):
    history = ("--checkpoint.every-steps", "1", "--checkpoint.history", "all")
    ranks(1).run("train", "digits", *SETTINGS, *EMA, *history, "--name", "all")
    run = ranks.cwd / "runs" / "all"
    states = [load_file(path / "model.safetensors") for path in sorted((run / "checkpoints").glob("step-*"))]
    assert len(states) == 18
    expected = {name: value.clone() for name, value in states[3].items()}  # the first after epoch 0.5, step 3
    for state in states[5::2]:
        for name, value in expected.items():
            if value.is_floating_point():
                value.lerp_(state[name], 1 - 0.9)
    found = average_of(run)
    assert all(torch.equal(found[name], value) for name, value in expected.items() if value.is_floating_point())


@pytest.fixture(scope="module")
def undisturbed(ranks) -> Path:
    """A run of two processes."""
    ranks(2).run("train", "digits", *SETTINGS, *EMA, "--name", "undisturbed")
    return ranks.cwd / "runs" / "undisturbed"


def test_a_resumed_run_has_the_same_bits(ranks, undisturbed):
    ranks(2).run("train", "digits", *SETTINGS, *EMA, "--name", "stopped", "--stop-after", "7", code=75)
    ranks(2).run("train", "--resume", "runs/stopped")
    assert identical(average_of(ranks.cwd / "runs" / "stopped"), average_of(undisturbed))


@pytest.mark.slow
def test_a_run_resumed_before_the_average_begins_has_the_same_bits(ranks):
    late = ("--average.name", "ema", "--average.decay", "0.9", "--average.every-steps", "10")
    ranks(1).run("train", "digits", *SETTINGS, *late, "--name", "late")
    first, *_, last = records(ranks.cwd / "runs" / "late", "epoch")
    assert first["val_loss"] == first["raw_loss"] and last["val_loss"] != last["raw_loss"]
    ranks(1).run("train", "digits", *SETTINGS, *late, "--name", "late-stopped", "--stop-after", "7", code=75)
    ranks(1).run("train", "--resume", "runs/late-stopped")
    assert identical(average_of(ranks.cwd / "runs" / "late-stopped"), average_of(ranks.cwd / "runs" / "late"))


def test_evaluation_is_of_the_average_and_of_the_weights_beside_it(ranks, undisturbed):
    last = records(undisturbed, "epoch")[-1]
    assert last["val_loss"] != last["raw_loss"]
    average, raw = (ranks(2).run("eval", "runs/undisturbed", *more) for more in ((), ("--raw",)))
    for kind, printed in (("val", average), ("raw", raw)):
        loss = float(re.search(r"loss ([\d.]+)", printed)[1])
        assert loss == pytest.approx(last[f"{kind}_loss"], abs=1e-4)


@pytest.mark.slow
def test_a_run_may_begin_to_average_when_it_is_resumed(ranks):
    ranks(2).run("train", "digits", *SETTINGS, "--name", "later", "--stop-after", "7", code=75)
    ranks(2).run("train", "--resume", "runs/later", *EMA, "--allow-changes")
    assert records(ranks.cwd / "runs" / "later", "epoch")[-1]["raw_top1"] >= 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"average": {"name": "ema", "decay": 1.0}}, "decay 1: the average would never change; set it below 1"),
        ({"average": {"name": "swa", "start_epoch": 9}, "epochs": 9}, "nothing would be averaged"),
    ],
)
def test_an_average_that_cannot_work_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate(values)


@pytest.mark.parametrize("strategy", ["localsgd", "async"])
def test_strategies_without_common_weights_are_refused(strategy):
    recipe = Recipe.model_validate({"average": {"name": "ema"}, "parallel": {"strategy": strategy}})
    with pytest.raises(UserError, match="does not work with strategy"):
        parallel.validate(recipe)
