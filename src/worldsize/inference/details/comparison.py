"""Whether two networks differ significantly on the same images (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIGNIFICANT = 0.05  # below this p


@dataclass(frozen=True)
class Comparison:
    """``only_first`` and ``only_second`` are the images that only one of the two gets right; ``p`` is the probability of a
    difference at least as large if both were equally good."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p: float

    @property
    def shown_p(self) -> str:
        """``p`` with two digits; with more where they would hide on which side of `SIGNIFICANT` it is."""
        texts = (f"{self.p:.{digits}g}" for digits in range(2, 18))
        return next(text for text in texts if float(text) != SIGNIFICANT or self.p == SIGNIFICANT)

    def __str__(self) -> str:
        """The verdict as a sentence."""
        if self.p < SIGNIFICANT:
            better = "the first network is better" if self.only_first > self.only_second else "the other one is better"
            return f"The difference is significant: {better} (McNemar, p = {self.shown_p})."
        return f"The difference is not significant (McNemar, p = {self.shown_p})."


def mcnemar(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> Comparison:
    """Compare which images two networks get right, (n,) each: McNemar's test (1947), exact and two-sided."""
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    n, k = only_first + only_second, min(only_first, only_second)
    tail = math.fsum(math.exp(_log_choose(n, i) - n * math.log(2)) for i in range(k + 1))
    counts = int((first & second).sum()), only_first, only_second, int((~first & ~second).sum())
    return Comparison(*counts, min(1.0, 2 * tail))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
