"""RandAugment, TrivialAugment, AutoAugment and AugMix with the operations and magnitudes of torchvision 0.27."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from worldsize.data.augmentation import operations as ops
from worldsize.data.augmentation.operations import Interpolation, Op, Program, Row
from worldsize.data.augmentation.policies.autoaugment import POLICIES
from worldsize.data.augmentation.policies.base import Draws, Policy, pick

Makers = dict[str, Callable[[float], Row]]
Magnitudes = dict[str, list[float]]

BINS = 31


def linspace(start: float, end: float, bins: int) -> list[float]:
    """`torch.linspace` of float32, which torchvision's magnitudes are made with; the same on every CPU."""
    first, last = float(np.float32(start)), float(np.float32(end))
    step = float(np.float32((last - first) / (bins - 1)))
    values = [first + step * i if i < bins // 2 else last - step * (bins - 1 - i) for i in range(bins)]
    return [float(np.float32(value)) for value in values]


def _makers(size: int, interpolation: Interpolation) -> Makers:
    """What makes the row of a signed magnitude, by torchvision's names: `torchvision.transforms.autoaugment._apply_op`."""

    def enhance(op: Op) -> Callable[[float], Row]:
        return lambda magnitude: ops.row(op, 1.0 + magnitude)

    def angle(magnitude: float) -> float:
        return math.radians(math.degrees(math.atan(magnitude)))  # torchvision passes shears as degrees

    return {
        "Identity": lambda _: ops.IDENTITY,
        "ShearX": lambda m: ops.shear_x(math.tan(angle(m)), interpolation),
        "ShearY": lambda m: ops.shear_y(math.sin(angle(m)) / math.cos(angle(m)), interpolation),
        "TranslateX": lambda m: ops.translate(int(m), 0, interpolation),
        "TranslateY": lambda m: ops.translate(0, int(m), interpolation),
        "Rotate": lambda m: ops.rotate(m, size, interpolation),
        "Brightness": enhance(Op.BRIGHTNESS),
        "Color": enhance(Op.COLOR),
        "Contrast": enhance(Op.CONTRAST),
        "Sharpness": enhance(Op.SHARPNESS),
        "Posterize": lambda m: ops.row(Op.POSTERIZE, int(m)),
        "Solarize": lambda m: ops.row(Op.SOLARIZE, m),
        "AutoContrast": lambda _: ops.row(Op.AUTOCONTRAST),
        "Equalize": lambda _: ops.row(Op.EQUALIZE),
        "Invert": lambda _: ops.INVERT,
    }


_NAMES = list(_makers(1, "nearest"))
_SIGNED = set(_NAMES[1:10])


def _magnitudes(
    bins: int, shear: float, shift: float, degrees: float, enhance: float, posterize: int, bits: int = 8
) -> Magnitudes:
    """The magnitudes of torchvision's operations by bin; 0 for those that have none. Posterize keeps ``bits`` at first, and
    ``posterize`` fewer in the last bin."""
    ends = dict.fromkeys(_NAMES[1:3], shear) | dict.fromkeys(_NAMES[3:5], shift) | {"Rotate": degrees}
    ends |= dict.fromkeys(_NAMES[6:10], enhance)
    values = {name: linspace(0.0, ends.get(name, 0.0), bins) for name in _NAMES}
    values["Posterize"] = [float(bits - round(i / ((bins - 1) / posterize))) for i in range(bins)]
    return values | {"Solarize": linspace(255.0, 0.0, bins)}


def _table(names: Sequence[str], magnitudes: Magnitudes, makers: Makers) -> Program:
    """The rows of all operations: (operations, bins, 2 signs, 8), the plus sign last."""
    return np.array(
        [[[makers[name](-m if name in _SIGNED else m), makers[name](m)] for m in magnitudes[name]] for name in names]
    )


class RandAugment(Policy):
    """``count`` operations of one magnitude (Cubuk et al. 2019, arXiv 1909.13719), as in torchvision.

    Args:
        magnitude: 0 to 30, of 31 bins.
    """

    def __init__(self, size: int, count: int, magnitude: int, interpolation: Interpolation) -> None:
        magnitudes = _magnitudes(BINS, 0.3, 150.0 / 331.0 * size, 30.0, 0.9, 4)
        self._rows = _table(_NAMES[:-1], magnitudes, _makers(size, interpolation))[:, magnitude]
        self.slots = count
        self.draws = 2 * count

    def program(self, draws: Draws) -> Program:
        return self._rows[pick(draws[:, ::2], len(self._rows)), pick(draws[:, 1::2], 2)]


class TrivialAugmentWide(Policy):
    """One operation of a random magnitude (Müller and Hutter 2021, arXiv 2103.10158), as in torchvision."""

    draws = 3
    slots = 1

    def __init__(self, size: int, interpolation: Interpolation) -> None:
        magnitudes = _magnitudes(BINS, 0.99, 32.0, 135.0, 0.99, 6)
        self._rows = _table(_NAMES[:-1], magnitudes, _makers(size, interpolation))

    def program(self, draws: Draws) -> Program:
        name, magnitude, sign = (pick(draws[:, [i]], n) for i, n in enumerate(self._rows.shape[:3]))
        return self._rows[name, magnitude, sign]


class AutoAugment(Policy):
    """Two operations, learned for a dataset (Cubuk et al. 2018, arXiv 1805.09501), as in torchvision."""

    draws = 5
    slots = 2

    def __init__(self, size: int, dataset: str, interpolation: Interpolation) -> None:
        magnitudes = _magnitudes(10, 0.3, 150.0 / 331.0 * size, 30.0, 0.9, 4)
        table = _table(_NAMES, magnitudes, _makers(size, interpolation))
        choices = POLICIES[dataset]
        self._rows = np.array([[table[_NAMES.index(name), level or 0] for name, _, level in pair] for pair in choices])
        self._chances = np.array([[chance for _, chance, _ in pair] for pair in choices])

    def program(self, draws: Draws) -> Program:
        pair = pick(draws[:, [0]], len(self._rows))
        slot = np.arange(2)
        rows = self._rows[pair, slot, pick(draws[:, 3:5], 2)]
        rows[draws[:, 1:3] > self._chances[pair, slot]] = ops.IDENTITY
        return rows


class AugMix(Policy):
    """A weighted sum of the image and three copies of it, each after one to three operations (Hendrycks et al. 2019, arXiv
    1912.02781), as in torchvision. The weights are uniform: alpha is 1.

    Args:
        severity: of the 10 magnitudes of an operation, the first that many are drawn from, 1 to 10.
    """

    _COPIES, _DEPTH = 3, 3
    slots = 1 + _COPIES * (_DEPTH + 1) + 1
    draws = 1 + _COPIES * (2 + 3 * _DEPTH)

    def __init__(self, size: int, severity: int, interpolation: Interpolation) -> None:
        magnitudes = _magnitudes(10, 0.3, size / 3.0, 30.0, 0.9, 4, bits=4)
        self._rows = _table(_NAMES[1:-1], magnitudes, _makers(size, interpolation))[:, :severity]

    def program(self, draws: Draws) -> Program:
        n, own = len(draws), draws[:, :1]
        u = draws[:, 1:].reshape(n, self._COPIES, -1)
        of_each = u[..., 2:].reshape(n, self._COPIES, self._DEPTH, 3)
        name, magnitude, sign = (pick(of_each[..., i], count) for i, count in enumerate(self._rows.shape[:3]))
        copies = np.zeros((n, self._COPIES, self._DEPTH + 1, ops.WIDTH))
        copies[:, :, :-1] = self._rows[name, magnitude, sign]
        # A copy with fewer operations has the first ones only.
        copies[:, :, :-1][np.arange(self._DEPTH) > pick(u[..., :1], self._DEPTH)] = ops.IDENTITY
        copies[:, :, -1, 0] = Op.MIX_ADD
        copies[:, :, -1, 1] = np.float32(1 - own) * _uniform_weights(u[..., 1])
        first, last = np.zeros((2, n, 1, ops.WIDTH))
        first[:, 0, 0], first[:, 0, 1], last[:, 0, 0] = Op.MIX_BEGIN, np.float32(own[:, 0]), Op.MIX_END
        return np.concatenate([first, copies.reshape(n, -1, ops.WIDTH), last], axis=1)


def _uniform_weights(draws: Draws) -> NDArray[np.float32]:
    """Positive weights (n, count) whose sum is 1, uniform among all such: Dirichlet's distribution with alpha 1."""
    exponential = np.maximum(-np.log1p(-draws), np.finfo(np.float64).tiny)
    return np.float32(exponential / exponential.sum(axis=1, keepdims=True))
