"""Local SGD with what ranks do not have alike: averaged optimizer states of loaded runs, and layers skipped by chance."""

from __future__ import annotations

import math

import pytest
import torch

from interruptions import SETTINGS, same_run
from paths import SMALL_NETWORK
from processes import distance, identical, losses, ranks_own, weights

LOCAL = ("--parallel.strategy", "localsgd", "--parallel.local-steps", "2")
SKIPPING = """
import torch
from torch import nn


class Skipping(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.conv(x)
        if not self.training or torch.rand(()) < 0.3:
            x = x + self.block(x)
        return self.head(x.mean((2, 3)))
"""


# With two ranks, the order in which a sum is computed does not matter.
@pytest.mark.parametrize(
    "optimizer",
    [
        ("--optimizer.name", "adamw", "--optimizer.lr", "2e-3"),
        pytest.param(("--optimizer.name", "rmsprop", "--optimizer.lr", "2e-3"), marks=pytest.mark.slow),
        pytest.param(("--optimizer.name", "lion", "--optimizer.lr", "2e-4"), marks=pytest.mark.slow),
    ],
)
def test_three_ranks_that_average_the_optimizer_resume_with_the_same_bits(ranks, optimizer):
    words = (*SETTINGS, "--model.name", SMALL_NETWORK, *LOCAL, "--parallel.average-momentum", *optimizer)
    train = ("train", "digits", *words, "--global-batch", "36", "--micro-batch", "12", "--max-steps", "10", "--name")
    name = optimizer[1]
    ranks(3).run(*train, f"{name}-whole")
    ranks(3).run(*train, name, "--stop-after", "3", code=75)
    ranks(3).run("train", "--resume", f"runs/{name}")
    whole, resumed = (ranks.cwd / "runs" / name for name in (f"{name}-whole", name))
    same_run(resumed, whole)
    assert identical(ranks_own(resumed), ranks_own(whole))


@pytest.fixture
def train_skipping(ranks):
    """train_skipping(name, *arguments): trains a network that skips a layer in most micro-batches, with two processes."""
    (ranks.cwd / "skipping.py").write_text(SKIPPING)

    def train(name: str, *arguments: str):
        words = (*SETTINGS, "--model.name", "skipping.py:Skipping", "--global-batch", "24", "--micro-batch", "12")
        ranks(2).run("train", "digits", *words, "--max-steps", "8", "--name", name, *arguments)
        return ranks.cwd / "runs" / name

    return train


def test_synchronous_steps_of_a_network_that_skips_layers_are_those_of_ddp(train_skipping):
    """A rank that has skipped a layer counts as one with a gradient of zero."""
    ddp = train_skipping("ddp", "--parallel.strategy", "ddp")
    local = train_skipping("local", *LOCAL, "--parallel.local-after", "9")
    assert losses(local) == pytest.approx(losses(ddp), rel=1e-5)
    assert distance(weights(local), weights(ddp)) < 1e-5


def test_averaged_moments_are_those_of_the_same_layers(train_skipping):
    run = train_skipping("moments", *LOCAL, "--parallel.average-momentum", "--optimizer.name", "adamw", "--seed", "2")
    assert all(math.isfinite(loss) for loss in losses(run))
    own = {key.partition("/")[2]: tensor for key, tensor in ranks_own(run).items() if key.startswith("0/")}
    moments = [key for key in own if "exp_avg" in key]
    assert moments and all(torch.equal(own[key], ranks_own(run)[f"1/{key}"]) for key in moments)
    # The ranks have skipped the layer in different steps.
    assert len({float(ranks_own(run)[f"{rank}/strategy/optimizer/step/block.weight"]) for rank in (0, 1)}) == 2
