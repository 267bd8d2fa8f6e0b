"""Stochastic depth for ResNets and Swin transformers: in training, a sample skips the residual of a block at random
(Huang et al. 2016, arXiv 1603.09382)."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import StochasticDepth, stochastic_depth


class _DroppingBasic(BasicBlock):  # type: ignore[misc]
    drop_probability: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return _joined(self, x, out)


class _DroppingBottleneck(Bottleneck):  # type: ignore[misc]
    drop_probability: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return _joined(self, x, out)


def _joined(block: _DroppingBasic | _DroppingBottleneck, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    shortcut = x if block.downsample is None else block.downsample(x)
    result: torch.Tensor = block.relu(stochastic_depth(out, block.drop_probability, "row", block.training) + shortcut)
    return result


def apply(model: nn.Module, probability: float) -> None:
    """Let the blocks of a torchvision ResNet drop their residuals, the last one with ``probability``.

    It grows linearly from 0 at the first block, as in timm. Names and tensors of the state dict stay the same.
    """
    blocks = [module for module in model.modules() if isinstance(module, (BasicBlock, Bottleneck))]
    for i, block in enumerate(blocks):
        block.__class__ = _DroppingBasic if isinstance(block, BasicBlock) else _DroppingBottleneck
        block.drop_probability = probability * i / (len(blocks) - 1)


def set_rates(model: nn.Module, probability: float) -> None:
    """Give a torchvision Swin transformer other rates of stochastic depth, the last block ``probability``.

    They grow linearly from 0 at the first block. Its builders take no rate.
    """
    layers = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    for i, layer in enumerate(layers):
        layer.p = probability * i / (len(layers) - 1)
