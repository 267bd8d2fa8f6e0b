"""RandAugment as timm 1.0 defines it: ``rand-m9-mstd0.5-inc1`` and its relatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from worldsize.data.augmentation import operations as ops
from worldsize.data.augmentation.operations import Interpolation, Op, Program, Row
from worldsize.data.augmentation.policies.base import Draws, Policy, pick

_LEVELS = 10.0
_CHANCE = 0.5  # of each chosen operation
_DRAWS = 5  # per operation: which, whether, two for the level, sign


def _makers(size: int, interpolation: Interpolation) -> list[Callable[[float], Row]]:
    """What makes the row of a signed level from -10 to 10, in the order of timm's ``_RAND_INCREASING_TRANSFORMS``."""

    def enhance(op: Op) -> Callable[[float], Row]:
        return lambda level: ops.row(op, max(0.1, 1.0 + level / _LEVELS * 0.9))

    def shift(level: float) -> float:
        return -(level / _LEVELS * 0.45) * size  # timm's sign is that of the inverse map

    return [
        lambda _: ops.row(Op.AUTOCONTRAST),
        lambda _: ops.row(Op.EQUALIZE),
        lambda _: ops.INVERT,
        lambda level: ops.rotate(level / _LEVELS * 30.0, size, interpolation),
        lambda level: ops.row(Op.POSTERIZE, 4 - int(abs(level) / _LEVELS * 4)),
        lambda level: ops.row(Op.SOLARIZE, 256 - min(256, int(abs(level) / _LEVELS * 256))),
        lambda level: ops.row(Op.SOLARIZE_ADD, min(128, int(abs(level) / _LEVELS * 110)), 128),
        enhance(Op.COLOR),
        enhance(Op.CONTRAST),
        enhance(Op.BRIGHTNESS),
        enhance(Op.SHARPNESS),
        lambda level: ops.shear_x(level / _LEVELS * 0.3, interpolation),
        lambda level: ops.shear_y(level / _LEVELS * 0.3, interpolation),
        lambda level: ops.translate(shift(level), 0, interpolation),
        lambda level: ops.translate(0, shift(level), interpolation),
    ]


class TimmRandAugment(Policy):
    """``count`` operations, each applied with probability 0.5, of a normally distributed level.

    Args:
        magnitude: mean of the level, 0 to 10.
        std: standard deviation of the level, which is clipped to 0 to 10.
    """

    def __init__(self, size: int, count: int, magnitude: float, std: float, interpolation: Interpolation) -> None:
        self._makers = _makers(size, interpolation)
        self._magnitude, self._std = magnitude, std
        self.slots = count
        self.draws = _DRAWS * count

    def program(self, draws: Draws) -> Program:
        u = draws.reshape(len(draws), self.slots, _DRAWS)
        # Box-Muller; 1 - u is in (0, 1]
        normal = np.sqrt(-2 * np.log(1 - u[..., 2])) * np.cos(2 * math.pi * u[..., 3])
        levels = np.clip(self._magnitude + self._std * normal, 0, _LEVELS) * np.where(u[..., 4] < 0.5, -1.0, 1.0)
        chosen = pick(u[..., 0], len(self._makers))
        rows = np.zeros((len(draws), self.slots, ops.WIDTH))
        for at in zip(*np.nonzero(u[..., 1] < _CHANCE), strict=True):
            rows[at] = self._makers[chosen[at]](float(levels[at]))
        return rows
