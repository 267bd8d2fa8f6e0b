"""Gradients added in one order, so that a run has the same bits at every world size.

A step's gradient is the sum of its micro-batches' gradients along the tree of `distributed.tree_sum`, whichever rank
computes which micro-batch, multiplied once by 1 / (number of micro-batches). BatchNorm's statistics are added along the same
tree. Everything else of a step (loss, predictions, evaluation) is summed exactly, for every strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from worldsize.parallel import base

if TYPE_CHECKING:
    import torch

    from worldsize.config.recipe import Parallel
    from worldsize.parallel.bitwise.tree_reduce import TreeReducer


class Strategy(base.Strategy):
    """Synchronous averaging with `tree_reduce.TreeReducer` instead of an all-reduce."""

    name = "bitwise"
    sharpens = True
    stable_between_updates = True
    about = "averages gradients; the same bits at any world size"
    processes = "any"
    settings = ("bucket_mb", "threads")
    identity_settings = ("threads",)
    same_bits = True

    @classmethod
    def exact(cls, settings: Parallel) -> bool:
        return True

    @classmethod
    def allows_merged_forward(cls, settings: Parallel) -> bool:
        return False  # the micro-batch is what the tree adds up

    @classmethod
    def threads(cls, settings: Parallel) -> int | None:
        return settings.threads

    @classmethod
    def variants(cls) -> list[base.Variant]:
        return [base.Variant(cls.name, ("--parallel.strategy", cls.name), threads=True)]

    def __init__(self, parts: base.StrategyInputs) -> None:
        super().__init__(parts)
        self.loss_divisor = 1  # the mean is taken after the sum
        self._parts = parts
        self._reducer = self._new_reducer()

    def _new_reducer(self) -> TreeReducer:
        from worldsize.parallel.bitwise.tree_reduce import TreeReducer

        parts = self._parts
        bucket_bytes = round(parts.settings.bucket_mb * 2**20)
        return TreeReducer(parts.model, parts.world, parts.accumulation, bucket_bytes, self.exchange)

    def parameters_added(self) -> None:
        super().parameters_added()
        self._reducer.close()
        self._reducer = self._new_reducer()

    @contextmanager
    def gradients(self, last: bool) -> Iterator[None]:
        with self._reducer.micro_batch(last):
            yield

    def mean(self, nodes: list[torch.Tensor]) -> torch.Tensor:
        return self._reducer.mean(nodes)
