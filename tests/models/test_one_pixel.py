"""Gradients in bf16 on a CPU, where torch's contain memory of others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from worldsize.models import blurpool
from worldsize.models.one_pixel import compute_in_fp32


def test_a_convolution_of_one_pixel_has_no_gradient_from_elsewhere():
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False).to(memory_format=torch.channels_last)
    network = nn.Sequential(layer)
    compute_in_fp32(network)
    images = torch.randn(16, 64, 1, 1).to(memory_format=torch.channels_last)
    for power in range(16):
        del [torch.full((2**size,), 10.0**power) for size in range(4, 22)][:]  # what the next memory contains
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            network(images.bfloat16()).sum().backward()
        assert layer.weight.grad is not None
        outside = layer.weight.grad.clone()
        outside[:, :, 1, 1] = 0  # all others see the padding only
        assert not outside.any()


def test_others_stay_as_they_are():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    plain = copy.deepcopy(network)
    compute_in_fp32(network)
    images = torch.randn(4, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(network(images), plain(images))
        assert torch.equal(copy.deepcopy(network)(images), plain(images))
    assert network.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("side", [1, 8])
def test_what_a_convolution_does_besides_is_kept(side):
    """A convolution of another class may blur its input, as here, or pad it or standardize its weights, as timm's do."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(16, 8, 3, stride=2, padding=1))
    assert blurpool.blur(network) == 1
    plain = copy.deepcopy(network)
    compute_in_fp32(network)
    images = torch.randn(4, 16, side, side)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(network(images).float(), plain(images).float(), rtol=0.02, atol=0.02)
