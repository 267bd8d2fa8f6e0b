"""A recipe's network for computing in a number format: what trains, evaluates, predicts and teaches builds it here."""

from __future__ import annotations

from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.models import factory, one_pixel
from worldsize.training.precision import Precision


def build(recipe: Recipe, classes: int, number_format: Precision) -> nn.Module:
    """`factory.build`, with what the network needs on the device of this number format.

    That has no influence on its state dict, and none on its numbers in other formats. All that computes with a network must
    use it: otherwise an evaluation has other numbers than the run's own.

    Raises:
        UserError: unknown model, or a setting that it does not support.
    """
    network = factory.build(recipe, classes, number_format.device, number_format.weights)
    if (number_format.name, number_format.device.type) == ("bf16", "cpu"):
        one_pixel.compute_in_fp32(network)
    return network
