"""Stochastic depth in ResNets: timm's rates, the plain network in evaluation, and its mean in training."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.layers import DropPath
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import StochasticDepth

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.models import factory

CPU = torch.device("cpu")


def network(name: str, drop: float | None) -> torch.nn.Module:
    settings = {"name": name, "drop_path": drop, "zero_init": False}
    return factory.build(Recipe.model_validate({"model": settings}), 5, CPU, torch.float64)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_rates_are_timms(name):
    ours = [m.drop_probability for m in network(name, 0.2).modules() if isinstance(m, (BasicBlock, Bottleneck))]
    theirs = timm.create_model(name, drop_path_rate=0.2, num_classes=5)
    drops = [
        getattr(block.drop_path, "drop_prob", 0.0) for layer in range(1, 5) for block in getattr(theirs, f"layer{layer}")
    ]
    assert ours == pytest.approx(drops)
    assert any(isinstance(m, DropPath) for m in theirs.modules())


def test_a_dropped_residual_leaves_the_shortcut_and_a_kept_one_is_scaled():
    block = network("resnet18", 0.5).layer4[1]
    images = torch.rand(64, 512, 3, 3, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        out = block(images)
        residual = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(images)))))
    dropped = torch.tensor([torch.equal(o, i) for o, i in zip(out, images, strict=True)])
    assert 15 < dropped.sum() < 49
    torch.testing.assert_close(out[~dropped], (images + 2 * residual)[~dropped].relu())


@pytest.mark.parametrize("name", ["swin_t", "swin_v2_t"])
def test_swin_transformers_get_other_rates(name):
    rates, own = ([m.p for m in network(name, drop).modules() if isinstance(m, StochasticDepth)] for drop in (0.1, None))
    assert own[-1] == 0.2
    assert rates == pytest.approx([rate / 2 for rate in own])


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny", "swin_t"])
def test_it_counts_as_random(name):
    assert factory.uses_random_draws(network(name, 0.1))
    assert not factory.uses_random_draws(network(name, 0.0))


def test_a_network_without_residual_blocks_is_refused():
    with pytest.raises(UserError, match="works with ResNets and convnext, efficientnet, swin, not with alexnet"):
        network("alexnet", 0.1)
