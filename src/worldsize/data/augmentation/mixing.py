"""Mixup and CutMix: how strongly each image is mixed with its partner. Pure functions of (seed, epoch, micro-batch).

The partner of an image is the one before it in its micro-batch, that of the first one the last, as in torchvision. All
images of a micro-batch are mixed in the same way. `worldsize.training.objective` mixes the images and labels on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worldsize.config.recipe import Augment
from worldsize.data.sampling.random_numbers import Use, seed_of

# The columns of a mix: weight of the own label, weight of the own pixels outside the box, then the box whose pixels are the
# partner's: top, left, bottom, right.
Mix = NDArray[np.float32]
WIDTH = 6

_UNMIXED = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Mixing:
    """The mixing of a run's micro-batches, for images of ``size`` x ``size`` pixels."""

    settings: Augment
    seed: int
    micro_batch: int
    size: int

    def __call__(self, epoch: int, first: int, count: int) -> Mix:
        """The mix of each sample of the epoch's micro-batches ``first`` to ``first + count - 1``, (samples, 6)."""
        mixes = [self._mix(epoch, first + i) for i in range(count)]
        return np.repeat(np.array(mixes, np.float32), self.micro_batch, axis=0)

    def _mix(self, epoch: int, micro_batch: int) -> tuple[float, ...]:
        settings = self.settings
        # Unlike numpy's Generator, RandomState gives the same numbers in every version (NEP 19).
        dice = np.random.RandomState(seed_of(self.seed, Use.MIX, epoch, micro_batch) & 0xFFFFFFFF)
        whether, which, y, x = dice.random_sample(4)
        if whether >= settings.mix_chance:
            return _UNMIXED
        if settings.cutmix and (not settings.mixup or which < settings.cutmix_share):
            return cutmix(dice.beta(settings.cutmix, settings.cutmix), y, x, self.size)
        weight = dice.beta(settings.mixup, settings.mixup)
        return (weight, weight, 0.0, 0.0, 0.0, 0.0)


def cutmix(weight: float, y: float, x: float, size: int) -> tuple[float, ...]:
    """A box around a pixel, cut off at the border, as torchvision's CutMix.

    Args:
        weight: part of the image that stays, unless the border cuts the box, 0 to 1.
        y, x: where the box's center is, uniform in [0, 1).
    """
    half = int(0.5 * math.sqrt(1.0 - weight) * size)
    row, column = int(y * size), int(x * size)
    top, left = max(0, row - half), max(0, column - half)
    bottom, right = min(size, row + half), min(size, column + half)
    return (1.0 - (bottom - top) * (right - left) / size**2, 1.0, top, left, bottom, right)
