"""What a pass in training shows about a network of the user's own, before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from interruptions import SETTINGS
from worldsize.models import training_pass

CODE = """
from torch import nn


def instance(classes):
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))


def cumulative(classes):
    norm = nn.BatchNorm2d(8, momentum=None)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))


def lazy(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


class Two(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(3, classes)

    def forward(self, x):
        logits = self.head(x.mean((2, 3)))
        return (logits, logits) if self.training else logits


class Shared(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.norm(self.second(self.norm(self.first(x)).relu())).mean((2, 3)))


class Fails(Two):
    def forward(self, x):
        return self.head(x.mean((2, 3))) + (self.missing if self.training else 0)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


def network(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), *middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (nn.BatchNorm2d(8), []),
        (nn.GroupNorm(2, 8), []),
        (nn.InstanceNorm2d(8, affine=True), []),
        (nn.Dropout(0.5), []),
        (nn.InstanceNorm2d(8, track_running_stats=True), ["running_mean, running_var of 1 (InstanceNorm2d)"]),
        (spectral_norm(nn.Conv2d(8, 8, 3)), ["_u, _v of 1.parametrizations.weight.0 (_SpectralNorm)"]),
    ],
)
def test_buffers_that_change_in_each_forward_pass_are_found(middle, expected):
    own = network(middle).eval()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    drawn = torch.get_rng_state()
    output, found, *_ = training_pass.tried(own, 32, 2)
    assert output.shape == (2, 10) and found == expected
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn) and not own.training


@pytest.mark.parametrize(
    ("size", "more", "code", "message"),
    [
        (1, (), 0, "changes running_mean, running_var of 1 (InstanceNorm2d). Of such state, only BatchNorm's"),
        (1, ("--parallel.strategy", "bitwise"), 64, "or train in one process, with a strategy other than bitwise"),
        (2, (), 64, "1 (InstanceNorm2d). Of such state, only BatchNorm's"),
    ],
)
def test_a_network_whose_numbers_depend_on_the_processes_trains_on_one_only(ranks, file, size, more, code, message):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:instance", "--max-steps", "2")
    output = ranks(size).run(*train, *more, "--name", f"instance{size}{len(more)}", code=code)
    assert message in output
    assert (ranks.cwd / "runs" / f"instance{size}{len(more)}").exists() == (code == 0)


def test_a_norm_layer_that_is_used_twice_has_a_warning(ranks, file):
    """torch updates its running statistics in each use."""
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:Shared", "--max-steps", "1", "--name", "shared")
    assert "uses norm (BatchNorm2d) 2 times" in ranks(1).run(*train)


def test_a_run_that_has_begun_with_such_a_network_resumes(ranks, file):
    """As those of older versions on several processes."""
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:instance", "--max-steps", "2", "--name", "begun")
    ranks(1).run(*train, "--stop-after", "1", code=75)
    assert "InstanceNorm2d" in ranks(2).run("train", "--resume", "runs/begun")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("cumulative", "1 (BatchNorm2d) has momentum=None, a cumulative average, which is not supported"),
        ("lazy", "the sizes of 1 (LazyLinear) are unknown: use a layer that is not lazy, or call the network once"),
        (
            "Two",
            "returned tuple in training for 6 images: it must return the logits of 10 classes, (n, 10), as in evaluation",
        ),
        ("Fails", ": a forward pass in training: AttributeError: 'Fails' object has no attribute 'missing'"),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused(ranks, file, function, message):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:{function}", "--max-steps", "2", "--name", function)
    assert message in ranks(1).run(*train, code=64)
    assert not (ranks.cwd / "runs" / function).exists()


def test_a_layer_that_keeps_its_cumulative_average_is_accepted(ranks, file):
    train = ("train", "digits", *SETTINGS, "--model.name", f"{file}:cumulative", "--max-steps", "2", "--name", "frozen")
    ranks(1).run(*train, "--model.freeze", "1")
