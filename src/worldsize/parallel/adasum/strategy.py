"""Adasum: adds up the steps of the ranks' optimizers as far as they point in different directions.

Maleki et al. 2020, "Scaling distributed training with adaptive summation" (arXiv 2006.02924). Each rank takes the step of
its own optimizer from the common weights with its own gradient. For the steps a and b of two ranks, tensor by tensor,

    Adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b

is their sum if they are orthogonal and their mean if they are parallel. Ranks r and r xor 1 combine first, then r and
r xor 2, and so on. The learning rate stays the one that is right for one rank's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from worldsize.parallel import base

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from worldsize.config.recipe import Parallel
    from worldsize.distributed.batch_plan import BatchPlan
    from worldsize.distributed.rank import RankInfo


class Strategy(base.Strategy):
    """Adasum of the optimizers' steps; each rank keeps its own optimizer state."""

    name = "adasum"
    about = "adds orthogonal steps, averages parallel ones"
    processes = "2, 4, 8, ..."
    rate = "process"
    identity_settings = ("hierarchical",)
    settings = identity_settings
    optimizer_names = ""
    local_gradients = True

    @classmethod
    def lr_batch(cls, settings: Parallel, plan: BatchPlan, rank_info: RankInfo) -> int:
        # Adasum adds up steps that each process computes from its own samples, so it keeps the learning rate that is
        # right for those (Maleki et al. 2020, section 5).
        return plan.per_process * (rank_info.local_size if settings.hierarchical else 1)

    @classmethod
    def variants(cls) -> list[base.Variant]:
        return [replace(variant, pairs=True) for variant in super().variants()]

    def __init__(self, parts: base.StrategyInputs) -> None:
        from worldsize.parallel.adasum import arithmetic

        super().__init__(parts)
        self._parts = parts
        rank_info = parts.world.rank_info
        self._machine: dist.ProcessGroup | None = None
        self._distances = [1 << i for i in range((rank_info.size - 1).bit_length())]
        if parts.settings.hierarchical:
            self._machine = arithmetic.machine_group(rank_info.size, rank_info.local_size)
            self._distances = [d for d in self._distances if d >= rank_info.local_size]

    def describe(self) -> str:
        return self.name if self._machine is None else f"{self.name} between machines, averaging inside"

    def update(self, step: Callable[[], None]) -> None:
        import torch

        from worldsize.parallel.adasum.arithmetic import in_memory_order

        weights = [in_memory_order(p) for p in self._parts.parameters]
        sizes = [w.numel() for w in weights]
        before = [w.clone() for w in weights]
        step()
        flat = torch.empty(sum(sizes), dtype=weights[0].dtype, device=weights[0].device)
        for weight, old, part in zip(weights, before, flat.split(sizes), strict=True):
            torch.sub(weight, old, out=part)
        with self.exchange.waiting():
            flat = self._combine(flat, sizes)
        for weight, old, part in zip(weights, before, flat.split(sizes), strict=True):
            torch.add(old, part, out=weight)

    def _combine(self, flat: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """The ranks' steps combined, the same on all; ``flat`` holds tensors of these sizes one after the other."""
        import torch.distributed as dist

        from worldsize.parallel.adasum.arithmetic import adasum, swap

        rank = self._parts.world.rank
        if self._machine is not None:
            self.exchange.sends(flat)
            dist.all_reduce(flat, group=self._machine)
            flat /= self._parts.world.rank_info.local_size
        for distance in self._distances:
            other = swap(flat, rank ^ distance)
            self.exchange.sends(flat)
            # Both partners compute the same result: the lower rank's step is always the first operand.
            first, second = (flat, other) if rank & distance == 0 else (other, flat)
            flat = adasum(first, second, sizes)
        return flat

    def state(self) -> dict[str, torch.Tensor]:
        from worldsize.optim import optimizers

        return optimizers.state_tensors(self.optimizer, self._parts.model)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        from worldsize.optim import optimizers

        optimizers.load_state_tensors(self.optimizer, self._parts.model, state)
