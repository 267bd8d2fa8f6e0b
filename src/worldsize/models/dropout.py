"""Dropout before the classifier: in training, each of its inputs is zero at random (Hinton et al. 2012, arXiv 1207.0580)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class DroppingLinear(nn.Linear):
    """A linear layer that drops some of its inputs in training and scales the others up."""

    drop_probability: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(input, self.drop_probability, self.training))


def apply(network: nn.Module, name: str, probability: float) -> None:
    """Drop inputs of the classifier ``name`` of a torchvision network with this probability.

    Networks with dropout layers next to their classifier, such as VGG and MobileNet, get the probability there. Names and
    tensors of the state dict stay the same.
    """
    layers = [m for m in network.get_submodule(name.rpartition(".")[0]).children() if isinstance(m, nn.Dropout)]
    for layer in layers:
        layer.p = probability
    if not layers:
        classifier = network.get_submodule(name)
        classifier.__class__ = DroppingLinear
        classifier.drop_probability = probability  # type: ignore[assignment]
