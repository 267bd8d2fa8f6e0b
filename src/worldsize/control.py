"""Decisions that ranks make together at the end of a step: stop, collect metrics, save."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from worldsize.world import World


@dataclass(frozen=True)
class Decision:
    """Identical on all ranks. ``new_broken`` is the number of broken images in this epoch, summed over ranks."""

    stop: bool
    collect: bool
    save: bool
    new_broken: int


class Control:
    """One small all-reduce per step, between hosts, that overlaps with the devices' computation.

    ``propose`` sends this rank's proposal before the last micro-batch, ``decide`` returns the result after it. Only rank 0
    decides what depends on a clock (collect, save); any rank can request a stop.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._message = torch.zeros(4, dtype=torch.int64)
        self._work: dist.Work | None = None

    def propose(self, stop: bool, collect: bool, save: bool, new_broken: int) -> None:
        main = self._world.is_main
        self._message = torch.tensor([stop, collect and main, save and main, new_broken])
        if self._world.control is not None:
            self._work = dist.all_reduce(self._message, group=self._world.control, async_op=True)

    def decide(self) -> Decision:
        if self._work is not None:
            self._work.wait()
            self._work = None
        stop, collect, save, new_broken = self._message.tolist()
        return Decision(bool(stop), bool(collect), bool(save), new_broken)
