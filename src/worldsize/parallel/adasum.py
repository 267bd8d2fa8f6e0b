"""Adasum: adds up what the ranks' optimisers did, as far as they went different ways.

Maleki et al. 2020, "Scaling distributed training with adaptive summation" (arXiv 2006.02924). Each rank takes the step of
its own optimiser from the common weights with its own gradient. For the steps a and b of two ranks, tensor by tensor,

    Adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b

is their sum where they are orthogonal and their mean where they are parallel. Ranks r and r xor 1 combine first, then
r and r xor 2, and so on. The learning rate stays what is right for one rank's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from worldsize import optim
from worldsize.parallel import base


class Strategy(base.Strategy):
    """Adasum of the optimisers' steps; each rank keeps an optimiser state of its own."""

    name = "adasum"
    local_gradients = True

    def __init__(self, parts: base.Parts) -> None:
        super().__init__(parts)
        self._parts = parts
        place = parts.world.place
        self._machine: dist.ProcessGroup | None = None
        self._distances = [1 << i for i in range((place.size - 1).bit_length())]
        if parts.settings.hierarchical:
            self._machine = _machine_group(place.size, place.local_size)
            self._distances = [d for d in self._distances if d >= place.local_size]

    def describe(self) -> str:
        return self.name if self._machine is None else f"{self.name} between machines, averaging inside"

    def update(self, step: Callable[[], None]) -> None:
        parameters = self._parts.parameters
        before = [p.detach().clone() for p in parameters]
        step()
        with torch.no_grad():
            steps = [p - b for p, b in zip(parameters, before, strict=True)]
            flat = torch.cat([s.reshape(-1) for s in steps])
            with self.exchange.waiting():
                flat = self._combine(flat, [s.numel() for s in steps])
            for p, b, part in zip(parameters, before, flat.split([s.numel() for s in steps]), strict=True):
                p.copy_(b + part.view(b.shape))

    def _combine(self, flat: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """The ranks' steps combined, the same on all; ``flat`` holds tensors of these sizes one after the other."""
        rank = self._parts.world.rank
        if self._machine is not None:
            self.exchange.sends(flat)
            dist.all_reduce(flat, group=self._machine)
            flat /= self._parts.world.place.local_size
        for distance in self._distances:
            other = _swap(flat, rank ^ distance)
            self.exchange.sends(flat)
            # Both partners compute the same: the lower rank's step is always the first operand.
            first, second = (flat, other) if rank & distance == 0 else (other, flat)
            flat = adasum(first, second, sizes)
        return flat

    def state(self) -> dict[str, torch.Tensor]:
        return optim.state_tensors(self.optimizer, self._parts.model)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        optim.load_state_tensors(self.optimizer, self._parts.model, state)


def adasum(a: torch.Tensor, b: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Adasum of two vectors (n,), taken apart for each of the consecutive tensors of these ``sizes`` (together n).

    Dot products are in float64. Where one is zero, the other remains.
    """
    parts = []
    for x, y in zip(a.split(sizes), b.split(sizes), strict=True):
        wide_x, wide_y = x.double(), y.double()
        dot, xx, yy = wide_x @ wide_y, wide_x @ wide_x, wide_y @ wide_y
        keep_x = 1 - torch.where(xx > 0, dot / (2 * xx), 0)
        keep_y = 1 - torch.where(yy > 0, dot / (2 * yy), 0)
        parts.append(keep_x.to(x.dtype) * x + keep_y.to(x.dtype) * y)
    return torch.cat(parts)


def _swap(mine: torch.Tensor, peer: int) -> torch.Tensor:
    """Send ``mine`` to ``peer`` and receive its tensor of the same shape."""
    theirs = torch.empty_like(mine)
    operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return theirs


def _machine_group(size: int, local_size: int) -> dist.ProcessGroup | None:
    """The group of this rank's machine; every rank makes all of them, in the same order."""
    ranks = [list(range(first, first + local_size)) for first in range(0, size, local_size)]
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    return group
