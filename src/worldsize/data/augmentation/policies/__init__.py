"""Augmentation policies by name. A new one is a file in this package and one line in `_POLICIES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worldsize.config.recipe import Augment
from worldsize.data.augmentation.operations import Color
from worldsize.data.augmentation.policies.base import Chain, Policy
from worldsize.data.augmentation.policies.simple import ColorJitter, Cutout, Lighting, RandomErasing
from worldsize.data.augmentation.policies.symmetries import QuarterTurns, VerticalFlip
from worldsize.data.augmentation.policies.three_augment import ThreeAugment
from worldsize.data.augmentation.policies.timm import TimmRandAugment
from worldsize.data.augmentation.policies.torchvision import AugMix, AutoAugment, RandAugment, TrivialAugmentWide

__all__ = ["Policy", "build", "fill_color", "mean_color"]

_POLICIES: dict[str, Callable[[Augment, int], Policy]] = {
    "randaugment": lambda settings, size: RandAugment(
        size, settings.operations, int(settings.magnitude), settings.interpolation
    ),
    "trivialaugment": lambda settings, size: TrivialAugmentWide(size, settings.interpolation),
    "randaugment-timm": lambda settings, size: TimmRandAugment(
        size, settings.operations, settings.magnitude, settings.magnitude_std, settings.interpolation
    ),
    "autoaugment-imagenet": lambda settings, size: AutoAugment(size, "imagenet", settings.interpolation),
    "autoaugment-cifar10": lambda settings, size: AutoAugment(size, "cifar10", settings.interpolation),
    "augmix": lambda settings, size: AugMix(size, settings.augmix_severity, settings.interpolation),
    "3-augment": lambda _, __: ThreeAugment(),
}


def mean_color(mean: Sequence[float]) -> Color:
    """The mean of normalization as a color."""
    red, green, blue = (min(255, round(255 * value)) for value in mean)
    return red, green, blue


def fill_color(settings: Augment, mean: Sequence[float]) -> Color:
    """The color that rotations, shears and translations bring in."""
    return mean_color(mean) if settings.fill == "mean" else (0, 0, 0)


def build(settings: Augment, mean: Sequence[float], size: int) -> Policy | None:
    """The recipe's policy for images of ``size`` x ``size`` pixels; None if it has none."""
    color = mean_color(mean)
    chosen: list[Policy] = []
    if settings.vflip:
        chosen.append(VerticalFlip(size, settings.vflip))
    if settings.rotate90:
        chosen.append(QuarterTurns(size, settings.rotate90))
    if settings.policy is not None:
        chosen.append(_POLICIES[settings.policy](settings, size))
    if any(settings.color_jitter):
        chosen.append(ColorJitter(settings.color_jitter))
    if settings.lighting:
        chosen.append(Lighting(settings.lighting))
    if settings.erasing:
        chosen.append(RandomErasing(size, settings.erasing, settings.erasing_area, settings.erasing_ratio, color))
    if settings.cutout:
        chosen.append(Cutout(size, settings.cutout, color))
    return Chain(chosen) if chosen else None
