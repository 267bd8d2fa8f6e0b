"""Frozen parts that begin to train at an epoch: the numbers of a plain loop, at every world size and after every stop."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from paths import SMALL_NETWORK
from processes import average_of, bits, distance, identical, losses, momentum, ranks_own, weights
from worldsize import parallel
from worldsize.config import recipe_files
from worldsize.config.recipe import Optimizer, Recipe
from worldsize.data import open_dataset
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.build import train_loader
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import factory, freezing
from worldsize.optim import optimizers, schedules

CPU = torch.device("cpu")
FROZEN = ("conv1", "bn1", "layer1")
VALUES = {
    "epochs": 3,
    "evaluate_every": 3,
    "global_batch": 16,
    "micro_batch": 4,
    "precision": "fp64",
    "deterministic": True,
    "data": {"name": "synthetic", "samples": 64, "classes": 4, "train_crop_size": 8, "val_crop_size": 8},
    "model": {"name": SMALL_NETWORK, "freeze": FROZEN, "unfreeze_epoch": 1},
    "optimizer": {"lr": 0.001, "lr_reference_batch": 16, "weight_decay": 1e-3},
    "schedule": {"warmup_epochs": 0.5},
    "average": {"name": "ema", "decay": 0.7},
    "track": {"every_seconds": 0},
}
PER_EPOCH, STEPS = 4, 12


@pytest.fixture(scope="module")
def train(ranks):
    """train(name, size, ...) trains once, perhaps in several parts that end after the steps ``stops``."""

    recipe = ranks.cwd / "recipe.yaml"
    recipe.write_text(recipe_files.to_yaml(Recipe.model_validate(VALUES)))

    def run(name: str, size: int, *more: str, stops: tuple[int, ...] = ()) -> Path:
        folder = ranks.cwd / "runs" / name
        if not folder.exists():
            parts = [(recipe, *more, "--name", name)] + [("--resume", f"runs/{name}")] * len(stops)
            for part, stop in zip(parts, (*stops, None), strict=True):
                ranks(size).run("train", *part, *(("--stop-after", f"{stop}") if stop else ()), code=75 if stop else 0)
        return folder

    return run


def plain_loop(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the parameters of the same run in plain PyTorch: frozen layers are in evaluation mode, and what begins
    to train has an optimizer of its own."""
    recipe = Recipe.model_validate(VALUES)
    free = recipe.model_copy(update={"model": recipe.model.model_copy(update={"freeze": (), "unfreeze_epoch": None})})
    network = factory.build(free, 4, CPU, torch.float64).train()
    frozen = [p for part in FROZEN for p in network.get_submodule(part).parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for part in FROZEN:
        network.get_submodule(part).eval()
    plan = batch_plan.plan(recipe, 1)
    dataset = open_dataset(recipe.data, folder)
    loader = train_loader(recipe, dataset.train, plan, World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1))
    normalise = Normalise(recipe.data, CPU, torch.float64)
    trained = [_sgd(p for p in network.parameters() if p.requires_grad)]
    found = []
    for step in range(STEPS):
        if step % PER_EPOCH == 0:
            batches = loader.training(plan, 0, step // PER_EPOCH)
        if step == PER_EPOCH:
            network.train()
            for parameter in frozen:
                parameter.requires_grad_(True)
            trained.append(_sgd(iter(frozen)))
        rate = schedules.peak_lr(recipe.optimizer, 16) * schedules.factor(recipe.schedule, step, PER_EPOCH, 3)
        total = 0.0
        for _ in range(4):
            batch = next(batches)
            loss = nn.functional.cross_entropy(network(normalise(batch.pixels)), batch.labels)
            (loss / 4).backward()
            total += loss.item() / 4
        found.append(total)
        for optimizer in trained:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
    loader.close()
    return found, {name: p.detach() for name, p in network.named_parameters()}


def _sgd(parameters) -> torch.optim.Optimizer:
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": 1e-3},
        {"params": [p for p in every if p.ndim == 1], "weight_decay": 0},
    ]
    return torch.optim.SGD(groups, lr=1, momentum=0.9, nesterov=True)


def test_it_equals_a_plain_loop(train, tmp_path):
    run = train("one", 1)
    expected, parameters = plain_loop(tmp_path)
    assert losses(run) == pytest.approx(expected, rel=1e-12)
    # The same bits in a fresh process; after other tests, matrix products may round otherwise.
    trained = weights(run)
    assert distance({name: trained[name] for name in parameters}, parameters) < 1e-12


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_world_size_changes_nothing(train, size):
    one, several = train("one", 1), train(f"{size}", size)
    assert losses(several) == pytest.approx(losses(one), rel=1e-9)
    assert distance(weights(several), weights(one)) < 1e-9  # running statistics included
    assert distance(momentum(several), momentum(one)) < 1e-9
    assert distance(average_of(several), average_of(one)) < 1e-9


def same(a: Path, b: Path) -> bool:
    assert losses(a) == losses(b) and ranks_own(b)
    return all(identical(read(a), read(b)) for read in (weights, momentum, ranks_own))


def test_a_resumed_run_is_bit_identical(train):
    """Stopped before the epoch, at its begin, and in it."""
    through, stopped = train("one", 1), train("stopped", 1, stops=(3, 4, 6))
    assert same(through, stopped) and identical(average_of(through), average_of(stopped))


NO_AVERAGE = ("--average.name", "none")
STRATEGIES = {
    "adamw": ("--optimizer.name", "adamw"),
    "powersgd": ("--parallel.compression", "powersgd", "--parallel.powersgd-start", "2"),
    "localsgd": ("--parallel.strategy", "localsgd", "--parallel.local-steps", "3", *NO_AVERAGE),
    "adasum": ("--parallel.strategy", "adasum"),
    "bitwise": ("--parallel.strategy", "bitwise"),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_every_strategy_a_resumed_run_is_bit_identical(train, strategy):
    chosen = STRATEGIES[strategy]
    assert same(train(strategy, 2, *chosen), train(f"{strategy}-stopped", 2, *chosen, stops=(3, 4, 6)))


@pytest.mark.slow
def test_a_bitwise_run_has_the_same_bits_at_every_world_size(train):
    chosen = STRATEGIES["bitwise"]
    assert bits(train("bitwise", 2, *chosen)) == bits(train("bitwise1", 1, *chosen)) == bits(train("bitwise4", 4, *chosen))


@pytest.mark.slow
def test_a_compiled_network_is_compiled_again(train):
    one, compiled = train("one", 1), train("compiled", 1, "--model.compile", stops=(6,))
    assert losses(compiled) == pytest.approx(losses(one), rel=1e-9)
    assert distance(weights(compiled), weights(one)) < 1e-9


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("earlier", ("--model.unfreeze-epoch", "1")),
        ("others", ("--model.freeze", "layer3")),  # as many layers with the same shapes
    ],
)
def test_a_run_may_freeze_other_parts_than_it_said(ranks, name, changes):
    """All layers begin with the running statistics that they have, and so do their averages."""
    recipe, model = ranks.cwd / f"{name}.yaml", VALUES["model"] | {"freeze": ("layer2",), "unfreeze_epoch": 2}
    recipe.write_text(recipe_files.to_yaml(Recipe.model_validate(VALUES | {"model": model})))
    ranks(1).run("train", recipe, "--name", name, "--stop-after", "6", code=75)
    folder = ranks.cwd / "runs" / name
    before, average = weights(folder), average_of(folder)
    ranks(1).run("train", "--resume", f"runs/{name}", "--allow-changes", *changes, "--stop-after", "7", code=75)
    after = weights(folder)
    assert not torch.equal(before["layer2.conv1.weight"], after["layer2.conv1.weight"])
    for norm in (key for key in before if key.endswith("running_var")):
        assert (after[norm] > 0.899 * before[norm]).all(), norm  # the step replaces a tenth
        assert (average_of(folder)[norm] > 0.699 * average[norm]).all(), norm


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


@pytest.mark.parametrize("name", ["sgd", "sgdw", "adamw", "rmsprop", "lars", "lamb", "muon", "nadamw", "lion"])
def test_what_an_optimizer_gets_later_begins_with_a_fresh_state(name):
    """As with two optimizers, one of which begins later."""
    settings = Optimizer(name=name, lr=0.01, weight_decay=0.01)
    together = network()
    for parameter in together[0].parameters():
        parameter.requires_grad_(False)
    apart = copy.deepcopy(together)
    one, early = (optimizers.build(model, settings, CPU) for model in (together, apart))
    late = None
    for step in range(6):
        if step == 3:
            for model in (together, apart):
                model[0].requires_grad_(True)
            optimizers.add_parameters(one, together, settings)
            later = copy.deepcopy(settings)
            for parameter in list(apart.parameters())[2:]:
                parameter.requires_grad_(False)
            late = optimizers.build(apart, later, CPU)
            apart.requires_grad_(True)
        for model, used in ((together, [one]), (apart, [early, late])):
            model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            for optimizer in filter(None, used):
                optimizers.set_lr(optimizer, 0.01 / (step + 1))
                optimizer.step()
            model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(together.parameters(), apart.parameters(), strict=True))


def test_only_what_was_frozen_is_trained_again():
    model = factory.build(Recipe.model_validate({"model": {"name": "resnet18"}}), 4, CPU, torch.float32)
    model.layer1[0].conv1.weight.requires_grad_(False)  # the network's own choice
    before = [type(layer) for layer in model.modules()]
    freezing.freeze(model, ("conv1", "layer1"))
    freezing.unfreeze(model)
    assert [type(layer) for layer in model.modules()] == before
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["layer1.0.conv1.weight"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.unfreeze-epoch", "1"], "model.unfreeze_epoch 1: no part is frozen; set model.freeze"),
        (["--model.freeze", "backbone", "--model.unfreeze-epoch", "0"], "must be at least 1 and less than epochs 3"),
        (["--model.freeze", "backbone", "--model.unfreeze-epoch", "3"], "must be at least 1 and less than epochs 3"),
        (
            ["--model.freeze", "backbone", "--model.unfreeze-epoch", "1", "--micro-batch", "1"],
            "uses BatchNorm, which needs more than one sample; pass --micro-batch 2 or more",
        ),
    ],
)
def test_mistakes_are_explained(fails, arguments, message):
    small = ("--data.name", "synthetic", "--data.samples", "64", "--model.name", SMALL_NETWORK)
    assert message in " ".join(fails("train", "digits", *small, "--epochs", "3", *arguments).split())


@pytest.mark.parametrize("strategy", ["async", "horovod"])
def test_strategies_with_a_fixed_set_of_parameters_refuse_it(strategy):
    recipe = Recipe.model_validate(VALUES | {"average": {"name": "none"}, "parallel": {"strategy": strategy}})
    with pytest.raises(UserError, match=f"unfreeze_epoch 1 does not work with strategy {strategy}"):
        parallel.validate(recipe)
