"""Networks of the user's own that leave out layers by chance, with parts that are frozen at the beginning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from interruptions import same_run
from processes import distance, weights
from worldsize.config.recipe import Recipe
from worldsize.models import factory, freezing, training_pass, trusted_code
from worldsize.models.training_pass import Skips

CODE = """
import torch
from torch import nn


class Whole(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.norm(self.conv(x))
        if not self.skips():
            x = x + self.block(x)
        return self.head(x.mean((2, 3)))

    def skips(self):
        return False


class Skipping(Whole):
    def skips(self):
        return self.training and bool(torch.rand(()) < 0.5)


class SkippingNorm(Skipping):
    def __init__(self, classes):
        super().__init__(classes)
        self.block = nn.Sequential(self.block, nn.BatchNorm2d(8))


class Drawing(Whole):
    def skips(self):
        torch.rand(())
        return False


"""
SETTINGS = (
    *("--data.name", "synthetic", "--data.samples", "64", "--data.classes", "4", "--data.train-crop-size", "16"),
    *("--data.val-crop-size", "16", "--data.val-resize-size", "16", "--epochs", "3", "--global-batch", "16"),
    *("--micro-batch", "4", "--precision", "fp32", "--deterministic", "--schedule.warmup-epochs", "0"),
    *("--device", "cpu", "--optimizer.lr", "0.01", "--track.every-seconds", "0"),
)
FROZEN = ("--model.freeze", "backbone", "--model.unfreeze-epoch", "1")
PER_EPOCH = 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


def recipe_of(file: Path, function: str, *frozen: str, unfreeze_epoch: int | None = None) -> Recipe:
    model = {"name": f"{file}:{function}", "freeze": frozen, "unfreeze_epoch": unfreeze_epoch}
    return Recipe.model_validate({"model": model, "data": {"train_crop_size": 16}})


def network_of(recipe: Recipe) -> nn.Module:
    trusted_code.trust(recipe)
    return factory.build(recipe, 4, torch.device("cpu"), torch.float32)


def skips(recipe: Recipe) -> Skips:
    network = network_of(recipe)
    trained = [p.requires_grad for p in network.parameters()]
    found = training_pass.skips(network, recipe)
    assert [p.requires_grad for p in network.parameters()] == trained
    return found


def test_what_is_frozen_until_an_epoch_counts_from_then_on(file):
    assert skips(recipe_of(file, "Skipping")) == Skips(True, True)
    assert skips(recipe_of(file, "Skipping", "backbone")) == Skips(False, False)
    assert skips(recipe_of(file, "Skipping", "backbone", unfreeze_epoch=1)) == Skips(False, True)
    assert skips(recipe_of(file, "Skipping", "conv", unfreeze_epoch=1)) == Skips(True, True)


@pytest.mark.parametrize("function", ["Whole", "Drawing"])
def test_a_network_that_leaves_out_nothing_skips_nothing(file, function):
    for frozen, epoch in (((), None), (("backbone",), None), (("backbone",), 1)):
        assert skips(recipe_of(file, function, *frozen, unfreeze_epoch=epoch)) == Skips(False, False)


def test_unfrozen_parts_stay_so(file):
    network = network_of(recipe_of(file, "Whole", "backbone", unfreeze_epoch=1))
    freezing.unfreeze(network)
    with freezing.differentiated(network):
        pass
    assert all(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize(("function", "seed"), [("Skipping", "0"), ("Skipping", "2"), ("SkippingNorm", "0")])
def test_parts_that_are_left_out_by_chance_begin_to_train(ranks, file, function, seed):
    """Whether the first pass after the unfreezing leaves them out depends on the seed."""
    train = ("train", "digits", *SETTINGS, *FROZEN, "--model.name", f"{file}:{function}", "--seed", seed)
    runs, whole, alone = ranks.cwd / "runs", f"whole-{function}-{seed}", f"alone-{function}-{seed}"
    ranks(2).run(*train, "--name", whole)
    ranks(1).run(*train, "--name", alone)
    assert distance(weights(runs / whole), weights(runs / alone)) < 1e-5


@pytest.mark.parametrize("stop", [PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 1])
def test_a_stop_around_the_unfreezing_changes_nothing(ranks, file, stop):
    train = ("train", "digits", *SETTINGS, *FROZEN, "--model.name", f"{file}:Skipping")
    runs = ranks.cwd / "runs"
    if not (runs / "unstopped").exists():
        ranks(2).run(*train, "--name", "unstopped")
    ranks(2).run(*train, "--name", f"stopped{stop}", "--stop-after", str(stop), code=75)
    ranks(2).run("train", "--resume", f"runs/stopped{stop}")
    same_run(runs / "unstopped", runs / f"stopped{stop}")


def test_parts_that_stay_frozen_may_be_left_out(ranks, file):
    train = ("train", "digits", *SETTINGS, "--model.freeze", "backbone", "--model.name", f"{file}:Skipping")
    runs = ranks.cwd / "runs"
    for size in (1, 2):
        ranks(size).run(*train, "--name", f"frozen-by-{size}")
    assert distance(weights(runs / "frozen-by-1"), weights(runs / "frozen-by-2")) < 1e-5


@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_a_static_graph_is_refused(ranks, file, frozen):
    train = ("train", "digits", *SETTINGS, *frozen, "--model.name", f"{file}:Skipping", "--parallel.static-graph")
    printed = ranks(2).run(*train, "--name", "static", code=64)
    assert "leaves out layers by chance" in printed and "--parallel.no-static-graph" in printed
    assert not (ranks.cwd / "runs" / "static").exists()


@pytest.mark.parametrize(
    ("size", "function", "more"),
    [
        (2, "Whole", FROZEN),
        (2, "Drawing", ()),
        (2, "Skipping", ("--model.freeze", "backbone")),  # what is left out is never trained
        (1, "Skipping", ()),  # DDP takes no part
    ],
)
def test_a_static_graph_of_what_is_never_left_out_stays(ranks, file, size, function, more):
    train = ("train", "digits", *SETTINGS, *more, "--model.name", f"{file}:{function}", "--parallel.static-graph")
    ranks(size).run(*train, "--name", f"static-{size}-{function}")


def test_a_run_that_began_with_a_static_graph_continues_without(ranks, file):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:Skipping", "--parallel.static-graph")
    ranks(1).run(*train, "--name", "began", "--stop-after", "2", code=75)
    assert "--parallel.no-static-graph" in ranks(2).run("train", "--resume", "runs/began", code=64)
    ranks(2).run("train", "--resume", "runs/began", "--parallel.no-static-graph")
