"""Gradient clipping: against timm and PyTorch, and runs at several world sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

from paths import SMALL_NETWORK
from processes import worldsize
from worldsize.config.recipe import Optimizer
from worldsize.optim import clipping


def network() -> nn.Module:
    """Of each kind of parameter, some with large gradients, some with none, and a filter of zeros."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 4 * 4, 5), nn.ReLU())
    model = nn.Sequential(body, nn.Linear(5, 4)).double()
    model[0][1].bias.requires_grad_(False)
    with torch.no_grad():
        model[0][0].weight[3] = 0
    model(torch.randn(6, 3, 6, 6, dtype=torch.float64)).square().sum().mul(0.3).backward()
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def clipped(**settings: float) -> dict[str, torch.Tensor]:
    model = network()
    clipping.clip(model, Optimizer(**settings), get_total_norm(gradients(model).values()))
    return gradients(model)


def test_adaptive_clipping_equals_timms():
    agc = pytest.importorskip("timm.utils.agc")
    expected = network()
    agc.adaptive_clip_grad(list(expected.parameters())[:-2], clip_factor=1.5)
    before, after = gradients(network()), clipped(clip_agc=1.5)
    torch.testing.assert_close(after, gradients(expected))
    assert torch.equal(after["1.weight"], before["1.weight"])
    units = (after["0.0.weight"] != before["0.0.weight"]).flatten(1).any(1)
    assert 0 < units.sum() < len(units)  # some filters are clipped, some are not


class Operations(TorchDispatchMode):
    """Counts the operations, each of which the host launches on a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_adaptive_clipping_takes_three_operations_for_each_parameter():
    """The norms of the weights and of the gradient, and the product; four more are for all parameters."""
    weights = [nn.Parameter(torch.rand(4, 3, 1, 1)) for _ in range(10)]
    for weight in weights:
        weight.grad = torch.rand_like(weight)
    with Operations() as operations:
        clipping.clip_adaptively(weights, 0.01)
    assert operations.count <= 3 * len(weights) + 4


def test_nothing_is_clipped_adaptively_where_only_the_classifier_is_trained():
    model = network()
    for parameter in model[0].parameters():
        parameter.grad = None
    before = gradients(model)
    clipping.clip(model, Optimizer(clip_agc=0.01), torch.tensor(1.0))
    assert before and all(torch.equal(gradients(model)[name], before[name]) for name in before)


def test_elements_are_clipped_to_a_value():
    before, after = gradients(network()), clipped(clip_value=0.2)
    assert max(float(g.abs().max()) for g in before.values()) > 0.2
    torch.testing.assert_close(after, {name: g.clamp(-0.2, 0.2) for name, g in before.items()})


def test_all_gradients_together_are_clipped_to_a_norm():
    before, after = gradients(network()), clipped(clip_norm=0.5)
    length = sum(float(g.square().sum()) for g in before.values()) ** 0.5
    torch.testing.assert_close(after, {name: g * 0.5 / (length + 1e-6) for name, g in before.items()})


def test_gradients_are_clipped_in_one_way_only():
    with pytest.raises(ValueError, match="clip_norm and clip_agc exclude each other: set one of them"):
        Optimizer(clip_norm=1.0, clip_agc=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("way", [("--optimizer.clip-value", "0.001"), ("--optimizer.clip-agc", "0.001")])
def test_it_equals_a_plain_loop_at_every_world_size(tmp_path, way):
    settings = ("digits", "--model.name", SMALL_NETWORK, "--global-batch", "16", "--micro-batch", "4", *way)
    plain = ("--precision", "fp64", "--strategy", "ddp", "--steps", "3", "--procs", "1,2", "--against", "torch")
    done = worldsize("prove", *settings, *plain, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_bits_are_the_same_at_every_world_size(tmp_path):
    settings = ("digits", "--model.name", SMALL_NETWORK, "--global-batch", "16", "--micro-batch", "4")
    done = worldsize("prove", *settings, "--optimizer.clip-agc", "0.001", "--steps", "3", "--procs", "1,2,4", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
