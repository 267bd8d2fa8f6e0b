"""Networks of the user's own that freeze layers or draw numbers by themselves: the same run, interrupted, and again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from interruptions import SETTINGS, same_run
from processes import bits, distance, losses, weights
from worldsize.models import factory, training_pass

CODE = """
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Plain(nn.Module):
    def __init__(self, classes, tracked=True):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, classes)
        self.norm = nn.BatchNorm2d(8, track_running_stats=tracked)
        if tracked:
            nn.init.uniform_(self.norm.running_var, 0.1, 0.7)

    def features(self, x):
        return self.norm(self.conv(x)).relu().mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


class Frozen(Plain):
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class Drawing(Plain):
    def __init__(self, classes):
        super().__init__(classes)
        nn.init.constant_(self.head.bias, np.random.rand() + random.random())

    def forward(self, x):
        skips = self.training and (random.random() < 0.5) != (np.random.rand() < 0.5)
        return self.head(self.features(x.flip(1) if skips else x))


class Skipping(Plain):
    def __init__(self, classes):
        super().__init__(classes)
        self.skipped = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        if not self.training or torch.rand(()) < 0.5:
            x = x + self.skipped(x)
        return self.head(self.features(x))


class SkippingNorm(Plain):
    # Few passes use its block, so that some steps do not.
    def __init__(self, classes):
        super().__init__(classes)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def features(self, x):
        x = self.norm(self.conv(x)).relu()
        if not self.training or torch.rand(()) < 0.4:
            x = x + self.block(x)
        return x.mean((2, 3))


class Unused(Skipping):
    def __init__(self, classes):
        super().__init__(classes)
        self.unused = nn.Linear(8, classes)


class Dropout(Plain):
    def forward(self, x):
        return self.head(functional.dropout(self.features(x), 0.5, self.training))


class AlwaysDropout(Plain):
    def forward(self, x):
        return self.head(functional.dropout(self.features(x), 0.5))


def untracked(classes):
    return Plain(classes, False)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("function", ["Frozen", "Drawing", "Skipping", "SkippingNorm"])
def test_interrupted_or_on_more_processes_it_is_the_same_run(ranks, file, function):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:{function}")
    runs = ranks.cwd / "runs"
    ranks(1).run(*train, "--name", f"{function}-whole")
    ranks(1).run(*train, "--name", f"{function}-parts", "--stop-after", "13", "--checkpoint.every-steps", "3", code=75)
    ranks(1).run("train", "--resume", f"runs/{function}-parts")
    same_run(runs / f"{function}-whole", runs / f"{function}-parts")
    ranks(2).run(*train, "--name", f"{function}-two")
    assert distance(weights(runs / f"{function}-whole"), weights(runs / f"{function}-two")) < 1e-5


@pytest.mark.parametrize("processes", [1, 2])
def test_with_bitwise_a_norm_that_is_skipped_by_chance_has_the_bits_of_one_process(ranks, file, processes):
    """Also of an evaluation, and with checkpoints in between, which both use the layers."""
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:SkippingNorm", "--parallel.strategy", "bitwise")
    runs, name = ranks.cwd / "runs", f"norm-bitwise-{processes}"
    if not (runs / "norm-bitwise").exists():
        ranks(1).run(*train, "--name", "norm-bitwise")
    more = ("--checkpoint.every-steps", "2", "--evaluate-every", "1", "--stop-after", "11")
    ranks(processes).run(*train, *more, "--name", name, code=75)
    ranks(processes).run("train", "--resume", f"runs/{name}")
    assert bits(runs / name) == bits(runs / "norm-bitwise")
    assert losses(runs / name) == losses(runs / "norm-bitwise")


def test_bitwise_leaves_parameters_alone_that_no_forward_pass_of_a_step_uses(ranks, file):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:Unused", "--optimizer.weight-decay", "0.1")
    ranks(1).run(*train, "--parallel.strategy", "single", "--name", "unused-single")
    single = weights(ranks.cwd / "runs/unused-single")
    for processes in (1, 2):
        name = f"unused-bitwise-{processes}"
        ranks(processes).run(*train, "--parallel.strategy", "bitwise", "--name", name)
        assert distance(single, weights(ranks.cwd / "runs" / name)) < 1e-5


def test_statistics_that_the_network_freezes_stay(ranks, file):
    begin = ("train", "digits", *SETTINGS, "--model.name", f"{file}:Frozen")
    ranks(1).run(*begin, "--max-steps", "1", "--name", "one")
    ranks(1).run(*begin, "--max-steps", "9", "--name", "nine")
    one, nine = (weights(ranks.cwd / "runs" / name) for name in ("one", "nine"))
    assert torch.equal(one["norm.running_var"], nine["norm.running_var"])
    assert not torch.equal(one["norm.weight"], nine["norm.weight"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("Dropout", "draws random numbers"),
        ("Drawing", "draws random numbers"),
        ("untracked", "BatchNorm layers of an unknown"),
    ],
)
def test_forward_passes_that_would_change_the_numbers_are_refused(ranks, file, function, message):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:{function}", "--forward-batch", "12", "--name", function)
    assert message in ranks(1).run(*train, code=64)


def test_a_network_that_draws_nothing_has_large_forward_passes(ranks, file):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:Plain", "--max-steps", "9")
    ranks(1).run(*train, "--forward-batch", "12", "--name", "large")
    ranks(1).run(*train, "--name", "small")
    large, small = (weights(ranks.cwd / "runs" / name) for name in ("large", "small"))
    assert distance(large, small) < 1e-5


@pytest.mark.parametrize(("function", "warns"), [("AlwaysDropout", True), ("Dropout", False)])
def test_an_evaluation_that_draws_has_a_warning(ranks, file, function, warns):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:{function}", "--max-steps", "1")
    assert ("draws random numbers in evaluation" in ranks(1).run(*train, "--name", f"warns-{function}")) == warns


def test_norms_are_found_in_either_mode_and_the_mode_stays():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    for mode in (True, False):
        assert factory.norms(network.train(mode)) == [network[1], network[2]]
        assert all(module.training == mode for module in network.modules())


def test_what_a_pass_draws_is_found():
    for layer, drew in {nn.Dropout(0.5): True, nn.ReLU(): False}.items():
        assert training_pass.tried(nn.Sequential(nn.Conv2d(3, 4, 3), layer), 8, 2).drew == drew
