"""Whether the replicas of the ranks still have the same weights: a flipped bit in one of them is named, and not saved.

Each rank applies the same gradient to the same weights, so with equal hardware the bits stay equal forever. Sums of the
weights' bits show any single bit that does not: 8 bytes per tensor and rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from worldsize.checkpoint.copying import in_memory_order
from worldsize.distributed.world import World
from worldsize.errors import ReplicasDiffer
from worldsize.training.environment import device_name

log = logging.getLogger(__name__)

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDEST = 8


class Replicas:
    """Compares the replicas of all ranks.

    Args:
        same: whether the strategy keeps them equal. All ranks must create it together.
    """

    def __init__(self, world: World, network: nn.Module, same: bool) -> None:
        self._world, self._network = world, network
        self._compared = same and world.size > 1
        # Different processors may round differently, which is no fault.
        self._alike = self._compared and len(set(world.gather(device_name(world.device.type)))) == 1

    def compare(self, step: int) -> None:
        """Compare them after ``step``. A collective: every rank must call it.

        Raises:
            ReplicasDiffer: they differ, although all ranks have the same hardware; otherwise that is logged once.
        """
        if not self._compared:
            return
        sums = self._world.to_main(self.sums())
        message = self._world.from_main("" if sums is None else self._difference(sums.tolist()))
        if not message:
            return
        if self._alike:
            raise ReplicasDiffer(
                f"after step {step:,}, {message}. The memory, the device or the network of a machine has changed a bit. "
                "This state is not saved: resume the run from its newest checkpoint, and check that machine"
            )
        self._compared = False
        if self._world.is_main:
            log.warning(
                "after step %d, %s: the processes have different hardware, which may round differently", step, message
            )

    def sums(self) -> torch.Tensor:
        """The sum of the bits of each parameter as whole numbers, int64 (parameters,)."""
        with torch.no_grad():
            return torch.stack([_words(p.detach()).sum(dtype=torch.int64) for p in self._network.parameters()]).cpu()

    def _difference(self, ranks: Sequence[Sequence[int]]) -> str:
        """Which rank's replica differs, and in what; empty if none does."""
        names = [name for name, _ in self._network.named_parameters()]
        for name, values in zip(names, zip(*ranks, strict=True), strict=True):
            [(most, count), *others] = Counter(values).most_common()
            if not others:
                continue
            if count == others[0][1]:
                return f"the weights {name} differ between the ranks, and no majority has the same"
            odd = [rank for rank, value in enumerate(values) if value != most]
            differ = f"ranks {', '.join(map(str, odd))} differ" if len(odd) > 1 else f"rank {odd[0]} differ"
            return f"the weights {name} of {differ} from those of the other {count}"
        return ""


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter's memory as whole numbers: words of 8 bytes if it fits them, whose sum takes a third of the time."""
    size, row = tensor.element_size(), in_memory_order(tensor)
    fits = all(count * size % _WIDEST == 0 for count in (tensor.numel(), tensor.storage_offset()))
    return row.view(_WORDS[_WIDEST]) if fits and row is not None else tensor.view(_WORDS[size])
