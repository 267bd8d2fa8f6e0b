"""Sums along one fixed binary tree, so that a floating-point sum does not depend on who adds which part of it.

The leaves 0..M-1 are added as in a binary counter: a node of level l and index i is the sum of the leaves
i * 2**l .. (i + 1) * 2**l - 1. If M is not a power of two, the nodes that remain are added from right to left. A process
that has consecutive leaves can add up whole nodes of this tree; whoever adds these nodes gets the same bits as one
process that has all leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TreeSum(Generic[T]):
    """Adds consecutive leaves, or nodes, from left to right; keeps at most two nodes per level.

    Args:
        add: returns left + right; may change ``left``.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._nodes: list[tuple[int, int, T]] = []

    def push(self, value: T, index: int, level: int = 0) -> None:
        """Append the node ``index`` of ``level``, the right neighbor of the last one."""
        while self._nodes and self._nodes[-1][:2] == (level, index - 1) and index % 2:
            value = self._add(self._nodes.pop()[2], value)
            level, index = level + 1, index // 2
        self._nodes.append((level, index, value))

    def take(self) -> list[T]:
        """The nodes, from left to right; none remain."""
        nodes, self._nodes = self._nodes, []
        return [value for _, _, value in nodes]

    def total(self) -> T:
        """The sum of all leaves, which must begin with leaf 0; none remain."""
        return fold(self.take(), self._add)


def fold(nodes: list[T], add: Callable[[T, T], T]) -> T:
    """The sum of the nodes that `TreeSum.take` returned, from right to left."""
    *others, total = nodes
    for value in reversed(others):
        total = add(value, total)
    return total


def layout(first: int, count: int) -> list[tuple[int, int]]:
    """The (level, index) of each node into which `TreeSum` adds the leaves ``first`` .. ``first + count - 1``."""
    nodes: TreeSum[tuple[int, int]] = TreeSum(lambda left, _: (left[0] + 1, left[1] // 2))
    for leaf in range(first, first + count):
        nodes.push((0, leaf), leaf)
    return nodes.take()
