"""A residual network that takes milliseconds per step, for tests of what does not depend on the network.

``--model.name .../small_network.py:residual``; its parts have the names of torchvision's.
"""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    """Two convolutions beside a shortcut; the second half of the network has twice the channels at half the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, outputs // inputs, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = outputs // inputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if outputs > inputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not the stride of the shortcut: see `worldsize.models.cpu_faults`.
        shortcut = self.shortcut(x[:, :, :: self.stride, :: self.stride])
        return (shortcut + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


class Residual(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTH)
        self.layer1, self.layer2, self.layer3 = Block(WIDTH, WIDTH), Block(WIDTH, 2 * WIDTH), Block(2 * WIDTH, 2 * WIDTH)
        self.fc = nn.Linear(2 * WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def residual(classes: int) -> nn.Module:
    return Residual(classes)
