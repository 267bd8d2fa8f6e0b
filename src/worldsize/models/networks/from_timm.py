"""timm's networks (extra ``timm``)."""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError


def build(name: str, classes: int, recipe: Recipe) -> nn.Module:
    """The network of this name, for images of the recipe's size.

    Raises:
        UserError: the name is unknown, or it does not support a setting.
    """
    import timm

    if recipe.model.stem != "imagenet":
        raise UserError(f"--model.stem {recipe.model.stem} works with torchvision's ResNets, not with timm:{name}")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(f'timm:{other}' for other in near)}?" if near else ""
        raise UserError(f"timm has no network {name!r}{hint}")
    plain, _, tag = name.partition(".")
    if tag and name not in (tagged := timm.list_models(f"{plain}.*", pretrained=True, include_tags=True)):
        raise UserError(f"timm has no network {name!r}; its tags of {plain}: {', '.join(tagged) or 'none'}")
    options: dict[str, Any] = {"num_classes": classes, **size_option(name, recipe)}
    if recipe.model.drop_path is not None:
        options["drop_path_rate"] = recipe.model.drop_path
    if recipe.model.dropout is not None:
        options["drop_rate"] = recipe.model.dropout
    try:
        network: nn.Module = timm.create_model(name, pretrained=False, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"timm:{name} cannot be built: {error}") from None
    return network


def size_option(name: str, recipe: Recipe) -> dict[str, Any]:
    """timm's option for the recipe's image size, if the network (with or without a tag) is of one size."""
    import timm

    config = timm.models.get_pretrained_cfg(name)
    return {"img_size": recipe.data.train_crop_size} if config is not None and config.fixed_input_size else {}


def depths(network: nn.Module) -> dict[str, int]:
    """`worldsize.models.networks.depths`, by the network's own groups."""
    from timm.models import group_parameters

    groups: dict[str, int] = group_parameters(network, network.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    last = max(groups.values())
    return {name: last - group for name, group in groups.items()}
