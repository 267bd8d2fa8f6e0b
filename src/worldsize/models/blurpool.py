"""BlurPool: blur before a convolution that skips pixels.

Zhang 2019, "Making convolutional networks shift-invariant again".
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

_MIN_CHANNELS = 16  # as in ffcv-imagenet: not the first convolution, which has three


class BlurConv2d(nn.Conv2d):
    """A convolution of the image blurred with the kernel [1 2 1] x [1 2 1] / 16, whose border is padded with zeros."""

    kernel: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.conv2d(input, self.kernel, padding=1, groups=self.in_channels))


def blur(model: nn.Module) -> int:
    """Let all convolutions with a stride blur their input first, as in ffcv-imagenet.

    Names and tensors of the state dict stay the same.

    Returns:
        How many convolutions blur now.
    """
    count = 0
    for module in model.modules():
        if type(module) is nn.Conv2d and max(module.stride) > 1 and module.in_channels >= _MIN_CHANNELS:
            module.__class__ = BlurConv2d
            layer = cast(BlurConv2d, module)
            kernel = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16
            layer.register_buffer("kernel", kernel.repeat(layer.in_channels, 1, 1, 1), persistent=False)
            count += 1
    return count
