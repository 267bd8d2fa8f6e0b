"""Weighted sampling: each class gets its share of an epoch, and the images of a class take turns.

Independent draws, as torch's WeightedRandomSampler makes them, leave a third of the images of an epoch out by chance. Here
the number of times that an image appears varies as little as whole numbers can:

- A class appears in an epoch as often as its share says, rounded up or down by systematic sampling (Madow 1949, "On the
  theory of systematic sampling, II"): one random offset per epoch rounds all classes, so no class is favored and the
  numbers add up to the epoch.
- The images of a class form a circle in random order, and each epoch continues where the one before it ended. So, over any
  number of complete epochs, the appearances of two images of a class differ by at most one.

A permutation of the epoch's draws, as in the full shuffle, then decides when each comes. So the order is a pure function of
seed, epoch and position, like the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from worldsize.data.sampling.order import Indices, Order, permute
from worldsize.data.sampling.random_numbers import Use, uniforms


@dataclass(frozen=True, eq=False)
class WeightedShuffle(Order):
    """Orders of ``draws`` draws per epoch.

    Attributes:
        seed: the recipe's.
        labels: the class of each sample, integers (n,).
        shares: how often the images of each class appear together, relative to other classes, float64 (classes,); at least
            0, and 0 for classes without images.
        draws: positions that an epoch uses.
    """

    seed: int
    labels: NDArray[np.integer]
    shares: NDArray[np.float64]
    draws: int

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        classes, turns = self._turns(epoch, positions)
        before = np.diff(self._ends(np.arange(epoch)), prepend=0)
        return self._circles[self._starts[classes] + (before[classes] + turns) % self._sizes[classes]]

    def appearances(self, epoch: int, positions: Indices) -> Indices:
        classes, turns = self._turns(epoch, positions)
        return turns // self._sizes[classes]

    def _turns(self, epoch: int, positions: Indices) -> tuple[Indices, Indices]:
        """The class of each draw, and its number among the draws of this class in the epoch."""
        draws = permute(self.seed, epoch, positions, self.draws)
        ends = self._ends(np.array([epoch]))
        classes = np.searchsorted(ends, draws, side="right")
        return classes, draws - np.concatenate([[0], ends])[classes]

    def _ends(self, epochs: Indices) -> Indices:
        """The sum over these epochs of the draws of each class and all classes before it, (classes,)."""
        whole = np.floor(self._expected_ends)
        offsets = np.sort(uniforms(self.seed, Use.SAMPLING, 0, epochs, 1)[:, 0])
        rounded_up = len(epochs) - np.searchsorted(offsets, 1 - (self._expected_ends - whole))
        return len(epochs) * whole.astype(np.int64) + rounded_up

    @cached_property
    def _expected_ends(self) -> NDArray[np.float64]:
        """The exact number of draws per epoch of each class and all classes before it, not rounded."""
        ends = self.draws * np.cumsum(self.shares) / self.shares.sum()
        ends[-1] = self.draws  # also where the division rounds
        return ends

    @cached_property
    def _circles(self) -> Indices:
        """All samples, one class after the other, in random order within each."""
        # Part 1: part 0 orders the draws.
        shuffled = permute(self.seed, 0, np.arange(len(self.labels)), len(self.labels), 1)
        return shuffled[np.argsort(self.labels[shuffled], kind="stable")]

    @cached_property
    def _sizes(self) -> Indices:
        return np.bincount(self.labels, minlength=len(self.shares))

    @cached_property
    def _starts(self) -> Indices:
        """The place of each class in the circles."""
        return np.cumsum(self._sizes) - self._sizes
