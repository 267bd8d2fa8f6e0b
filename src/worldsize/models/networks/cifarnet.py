"""A small network that learns images of about 32 pixels in few epochs.

Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv 2404.00498), section 3: 2 million parameters; its first
layer whitens 2 x 2 patches and is not trained; convolutions begin as the identity; BatchNorm has no weights, and its biases
learn 64 times as fast. What differs: the paper computes the first layer's filters from the run's training images. Here
they are those of CIFAR-10, so that the initial weights depend on the seed alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

_WIDTHS = (64, 256, 256)
_BIAS_SCALE = 8  # BatchNorm's biases count 8 times, so their gradient and their steps do: they learn 64 times as fast
_LOGITS = 9  # what logits are divided by

# The principal components of 2 x 2 patches of natural images are close to products of a pattern and a color. For each
# pattern, the weights of red, green and blue in three filters: the eigenvectors of the covariance on CIFAR-10's training
# images, normalized per channel, divided by the root of (eigenvalue + 5e-4). Their outputs correlate by at most 0.02.
_FILTERS = {
    (1, 1, 1, 1): ((0.18, 0.19, 0.18), (0.77, 0.01, -0.78), (1.01, -1.89, 0.97)),  # the mean
    (1, -1, 1, -1): ((1.02, 1.05, 0.93), (5.99, -0.71, -5.76), (5.46, -11.71, 7.13)),  # left to right
    (1, 1, -1, -1): ((0.94, 0.95, 0.86), (5.56, -0.73, -5.26), (5.05, -11.17, 6.89)),  # top to bottom
    (1, -1, -1, 1): ((2.49, 2.54, 2.29), (15.68, -1.76, -15.06), (11.31, -24.28, 14.61)),  # the diagonals
}


def whitening() -> torch.Tensor:
    """Filters whose outputs have little correlation and at most unit variance, and their negatives: (24, 3, 2, 2)."""
    patterns = torch.tensor(list(_FILTERS)) / 2
    filters = torch.einsum("pic,pj->picj", torch.tensor(list(_FILTERS.values())), patterns).reshape(-1, 3, 2, 2)
    return torch.cat([filters, -filters])


class CifarNet(nn.Module):
    """Logits (n, classes) of images (n, 3, side, side); the side is at least 16 pixels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        filters = whitening()
        self.whitening = nn.Conv2d(3, len(filters), 2)
        self.whitening.weight = nn.Parameter(filters, requires_grad=False)
        self.whitening.bias = nn.Parameter(torch.zeros(len(filters)))
        widths = (len(filters), *_WIDTHS)
        self.layers = nn.Sequential(*(Block(*pair) for pair in pairwise(widths)))
        self.fc = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.layers(functional.gelu(self.whitening(images)))
        return self.fc(x.amax((2, 3))) / _LOGITS


class Block(nn.Module):
    """(n, inputs, H, W) to (n, outputs, H // 2, W // 2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(inputs, outputs), _norm(outputs)
        self.conv2, self.norm2 = _convolution(outputs, outputs), _norm(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.conv1(x), 2)
        x = functional.gelu(_BIAS_SCALE * self.norm1(x))
        return functional.gelu(_BIAS_SCALE * self.norm2(self.conv2(x)))


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """3 x 3; the first ``inputs`` of its outputs begin as its inputs."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(layer.weight[:inputs])
    return layer


def _norm(channels: int) -> nn.BatchNorm2d:
    """BatchNorm whose weights are constant, and undo what its outputs are multiplied by."""
    layer = nn.BatchNorm2d(channels, momentum=0.4)  # the paper's 0.6, as torch counts it
    nn.init.constant_(layer.weight, 1 / _BIAS_SCALE)
    layer.weight.requires_grad_(False)
    return layer
