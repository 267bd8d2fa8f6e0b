"""The curve of a learning-rate range test, and what it suggests. Pure functions.

Smith 2017, "Cyclical learning rates for training neural networks" (arXiv 1506.01186), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SMOOTHING = 0.9
_DIVERGED = 2.0  # times the best smoothed loss


@dataclass(frozen=True)
class Curve:
    """Learning rates, rising, and the smoothed loss at each, up to where it diverges."""

    rates: list[float]
    losses: list[float]

    @property
    def best(self) -> int:
        """The position of the lowest loss."""
        return min(range(len(self.losses)), key=self.losses.__getitem__)

    @property
    def steepest(self) -> int:
        """The position before the lowest loss at which the loss falls fastest per factor of the learning rate."""
        last = max(self.best, 1)
        slopes = [
            (self.losses[i + 1] - self.losses[i]) / math.log(self.rates[i + 1] / self.rates[i])
            for i in range(min(last, len(self.rates) - 1))
        ]
        return min(range(len(slopes)), key=slopes.__getitem__)

    @property
    def suggested(self) -> float:
        """Where the loss falls steepest, but at least a tenth of the rate with the lowest loss."""
        return max(self.rates[self.steepest], self.rates[self.best] / 10)


def geometric(low: float, high: float, count: int) -> list[float]:
    """``count`` rates from ``low`` to ``high``, each the same multiple of the one before it."""
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def smoothed(rates: Sequence[float], losses: Sequence[float | None]) -> Curve:
    """The curve of these losses, one for each rate; None for a loss that is not finite.

    The loss is an exponential moving average, corrected for its start. The curve ends before the first loss that is not
    finite, or where the average is twice its minimum so far.

    Raises:
        ValueError: it ends after fewer than two points.
    """
    average, kept = 0.0, Curve([], [])
    for i, (rate, loss) in enumerate(zip(rates, losses, strict=False)):
        if loss is None or not math.isfinite(loss):
            break
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        value = average / (1 - _SMOOTHING ** (i + 1))
        if kept.losses and value > _DIVERGED * min(kept.losses):
            break
        kept.rates.append(rate)
        kept.losses.append(value)
    if len(kept.rates) < 2:
        raise ValueError("the loss is not finite from the start")
    return kept


def rounded(rate: float) -> float:
    """The nearest of 1, 2, 3, 5, 7 times a power of ten: the test is not more precise than that."""
    power = 10.0 ** math.floor(math.log10(rate))
    nearest = min((1, 2, 3, 5, 7, 10), key=lambda digit: abs(math.log(rate / (digit * power))))
    return float(f"{nearest * power:.6g}")


def neighbours(rate: float) -> list[float]:
    """The rate, and about a third and three times of it."""
    return [rounded(rate / 3), rounded(rate), rounded(rate * 3)]
