"""torchvision's classification networks."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from torch import nn
from torchvision import models
from torchvision.models.resnet import BasicBlock, Bottleneck

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.models import drop_path

# Networks of torchvision that have stochastic depth. The builders of Swin set its rates themselves.
_STOCHASTIC = ("convnext", "efficientnet", "swin")
# Parameters of its transformers that are embeddings, whatever module they are in.
EMBEDDINGS = ("class_token", "pos_embedding", "relative_position_bias_table")


def build(name: str, classes: int, recipe: Recipe) -> nn.Module:
    """The network of this name.

    Raises:
        UserError: unknown, or it does not support a setting.
    """
    settings = recipe.model
    model = _construct(name, classes, settings.drop_path)
    if settings.stem == "cifar":
        _cifar_stem(model, name)
    if settings.zero_init:
        _zero_init(model)
    return model


def names() -> list[str]:
    """All classification models of the installed torchvision."""
    return [str(name) for name in models.list_models(module=models)]


def _construct(name: str, classes: int, drop: float | None) -> nn.Module:
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"torchvision has no classification model {name!r}{hint}")
    builder: Callable[..., nn.Module] = models.get_model_builder(name)
    options: dict[str, object] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        # With auxiliary heads the output type differs during training, and the recipes define no loss for them.
        options |= {"aux_logits": False, "init_weights": True}
    if drop is None:
        return builder(weights=None, **options)
    if name.startswith(_STOCHASTIC) and not name.startswith("swin"):
        return builder(weights=None, stochastic_depth_prob=drop, **options)
    model = builder(weights=None, **options)
    if isinstance(model, models.SwinTransformer):
        drop_path.set_rates(model, drop)
        return model
    if not isinstance(model, models.ResNet):
        raise UserError(f"--model.drop-path works with ResNets and {', '.join(_STOCHASTIC)}, not with {name}: leave it out")
    drop_path.apply(model, drop)
    return model


def _cifar_stem(model: nn.Module, name: str) -> None:
    """3 x 3 stride 1 without pooling, as in He et al. 2015 (arXiv 1512.03385, section 4.2) for 32 x 32 images."""
    if not isinstance(model, models.ResNet):
        raise UserError(f"--model.stem cifar works only with ResNets, not with {name}; use --model.stem imagenet")
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def _zero_init(model: nn.Module) -> None:
    """Each residual block starts as the identity (Goyal et al. 2017, section 5.1). Other models are unchanged."""
    for module in model.modules():
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
        elif isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)
