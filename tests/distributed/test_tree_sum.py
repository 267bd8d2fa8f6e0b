"""Sums along one binary tree: the definition, and the same bits for every way to share the leaves."""

from __future__ import annotations

import functools
import operator
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.distributed.tree_sum import TreeSum, fold, layout
from worldsize.parallel.bitwise.tree_reduce import rounds


def values(count: int) -> list[float]:
    """Floats of many magnitudes, whose sum depends on the order of the additions."""
    draws = random.Random(count)
    return [draws.uniform(-1, 1) * 10 ** draws.randint(-8, 8) for _ in range(count)]


def defined(leaves: list[float], level: int, index: int) -> float | None:
    """The sum of a node from the definition of the tree; None if it has no leaves."""
    if level == 0:
        return leaves[index] if index < len(leaves) else None
    left, right = (defined(leaves, level - 1, 2 * index + side) for side in (0, 1))
    return left if right is None else left + right


@given(count=st.integers(1, 300), data=st.data())
def test_any_sharing_of_the_leaves_gives_the_bits_of_the_definition(count, data):
    leaves = values(count)
    cuts = sorted(data.draw(st.lists(st.integers(1, count), max_size=12)))
    together: TreeSum[float] = TreeSum(operator.add)
    for first, end in zip([0, *cuts], [*cuts, count], strict=True):
        own: TreeSum[float] = TreeSum(operator.add)
        for leaf in range(first, end):
            own.push(leaves[leaf], leaf)
        for value, (level, index) in zip(own.take(), layout(first, end - first), strict=True):
            together.push(value, index, level)
    assert together.total() == defined(leaves, 9, 0)


def test_another_order_gives_other_bits():
    leaves = values(64)
    # Not sum(): since Python 3.12, it corrects the rounding of its additions.
    assert defined(leaves, 6, 0) != functools.reduce(operator.add, leaves)


@pytest.mark.parametrize(
    ("first", "count", "nodes"),
    [
        (0, 8, [(3, 0)]),
        (4, 4, [(2, 1)]),
        (0, 6, [(2, 0), (1, 2)]),
        (3, 3, [(0, 3), (1, 2)]),
        (2, 2, [(1, 1)]),
        (1, 1, [(0, 1)]),
    ],
)
def test_consecutive_leaves_are_few_nodes(first, count, nodes):
    assert layout(first, count) == nodes


def test_nodes_that_remain_are_added_from_right_to_left():
    assert fold(["abcd", "ef", "g"], lambda left, right: f"({left}{right})") == "(abcd(efg))"


@given(st.integers(1, 40), st.integers(1, 12))
def test_additions_in_rounds_are_those_of_the_tree(ranks: int, accumulation: int):
    """Written as text, so that the order and the brackets count."""
    places = [place for rank in range(ranks) for place in layout(rank * accumulation, accumulation)]
    tree: TreeSum[str] = TreeSum(lambda left, right: f"({left}+{right})")
    nodes = [f"{level}.{index}" for level, index in places]
    for text, (level, index) in zip(nodes, places, strict=True):
        tree.push(text, index, level)
    additions = rounds(places)
    for pairs in additions:
        assert len({number for pair in pairs for number in pair}) == 2 * len(pairs)
        for left, right in pairs:
            nodes[left] = f"({nodes[left]}+{nodes[right]})"
    assert nodes[0] == tree.total()
    assert len(additions) <= 2 * (ranks * accumulation).bit_length()
