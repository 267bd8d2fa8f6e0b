"""Policies for images without an up, such as those of a satellite or a microscope: they only move whole pixels."""

from __future__ import annotations

import numpy as np

from worldsize.data.augmentation import operations as ops
from worldsize.data.augmentation.operations import Program
from worldsize.data.augmentation.policies.base import Draws, Policy, pick


class VerticalFlip(Policy):
    """Flip an image upside down, as torchvision's RandomVerticalFlip.

    Args:
        size: side of the images, pixels.
        chance: probability.
    """

    draws = 1
    slots = 1

    def __init__(self, size: int, chance: float) -> None:
        self._rows = np.array([ops.IDENTITY, ops.place(1, 0, 0, 0, -1, size)])
        self._chance = chance

    def program(self, draws: Draws) -> Program:
        return self._rows[(draws < self._chance).astype(int)]


class QuarterTurns(Policy):
    """Turn an image by 0, 90, 180 or 270 degrees, each as likely, as albumentations' RandomRotate90.

    Args:
        size: side of the images, pixels.
        chance: probability of that; otherwise the image stays as it is.
    """

    draws = 2
    slots = 1

    def __init__(self, size: int, chance: float) -> None:
        # Row k turns k times counterclockwise, as np.rot90.
        self._rows = np.array(
            [
                ops.IDENTITY,
                ops.place(0, -1, size, 1, 0, 0),
                ops.place(-1, 0, size, 0, -1, size),
                ops.place(0, 1, 0, -1, 0, size),
            ]
        )
        self._chance = chance

    def program(self, draws: Draws) -> Program:
        turns = np.where(draws[:, :1] < self._chance, pick(draws[:, 1:], 4), 0)
        return self._rows[turns]
