"""Networks of this project, where torchvision and timm have none for the purpose."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.models.networks.cifarnet import CifarNet

NETWORKS: dict[str, Callable[[int], nn.Module]] = {"cifarnet": CifarNet}


def build(name: str, classes: int, recipe: Recipe) -> nn.Module:
    """The network of this name.

    Raises:
        UserError: the name is unknown, or it does not support a setting.
    """
    if name not in NETWORKS:
        raise UserError(f"worldsize has no network {name!r} of its own; it has {', '.join(NETWORKS)}")
    if recipe.model.drop_path is not None:
        raise UserError(f"--model.drop-path: worldsize:{name} has no residual blocks; leave it out")
    return NETWORKS[name](classes)
