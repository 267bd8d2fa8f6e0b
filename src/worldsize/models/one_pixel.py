"""Keeps a defect of torch on CPUs out of training: in bf16, the gradient of some convolutions contains memory of others.

It is that of the weights of a convolution with a stride, larger than one pixel, of images that are one pixel high or wide:
the last stage of a ResNet for images of at most 16 pixels. Seen with torch 2.12.1 (oneDNN, AVX-512); right in fp32.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn


def compute_in_fp32(network: nn.Module) -> None:
    """Let these convolutions of a network compute in fp32, under autocast on a CPU."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and max(layer.stride) > 1 and max(layer.kernel_size) > 1:
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Conv2d, images: torch.Tensor) -> torch.Tensor:
    forward = type(layer).forward  # some do more than convolve: they blur, pad, or standardize their weights
    if min(images.shape[-2:]) > 1:
        return forward(layer, images)
    with torch.autocast("cpu", enabled=False):
        return forward(layer, images.float())
