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

_CACHED = 1 << 16  # elements


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
        weights = [_in_memory_order(p) for p in self._parts.parameters]
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

    Dot products are in float64. Where one is zero, the other remains. The result takes the place of ``a``.
    """
    for x, y in zip(a.split(sizes), b.split(sizes), strict=True):
        dot, xx, yy = _dot_products(x, y)
        keep_x = 1 - torch.where(xx > 0, dot / (2 * xx), 0)
        keep_y = 1 - torch.where(yy > 0, dot / (2 * yy), 0)
        x.mul_(keep_x.to(x.dtype)).addcmul_(y, keep_y.to(y.dtype))
    return a


def _dot_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(x.y, x.x, y.y) in float64."""
    # On a CPU, pieces whose float64 form stays in its cache: 0.11 instead of 0.19 s for ResNet-50, one thread.
    piece = _CACHED if x.device.type == "cpu" else max(1, x.numel())
    total = torch.zeros(3, dtype=torch.float64, device=x.device)
    for part_x, part_y in zip(x.split(piece), y.split(piece), strict=True):
        wide_x, wide_y = part_x.double(), part_y.double()
        total += torch.stack([wide_x @ wide_y, wide_x @ wide_x, wide_y @ wide_y])
    return total


def _in_memory_order(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's numbers as they lie in memory, (n,), whatever its layout; the same storage."""
    return parameter.detach().as_strided((parameter.numel(),), (1,))


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
