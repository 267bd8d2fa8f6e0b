"""What an augmentation policy is: a pure function from uniform draws to the operations of each image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worldsize.data.augmentation.operations import Program

Draws = NDArray[np.float64]


class Policy(ABC):
    """A way to choose operations for images.

    Attributes:
        draws: uniform draws per image.
        slots: operations per image.
    """

    draws: int
    slots: int

    @abstractmethod
    def program(self, draws: Draws) -> Program:
        """The operations of n images, float64 (n, slots, 8), for draws (n, self.draws) in [0, 1)."""


class Chain(Policy):
    """Several policies, one after the other."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = policies
        self.draws = sum(policy.draws for policy in policies)
        self.slots = sum(policy.slots for policy in policies)

    def program(self, draws: Draws) -> Program:
        ends = np.cumsum([policy.draws for policy in self._policies])[:-1]
        parts = zip(self._policies, np.split(draws, ends, axis=1), strict=True)
        return np.concatenate([policy.program(part) for policy, part in parts], axis=1)


def pick(draws: Draws, n: int) -> NDArray[np.int64]:
    """Integers from 0 to n - 1."""
    return (draws * n).astype(np.int64)
