"""Per-step metrics: kept on the device, and collected from all ranks periodically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from worldsize.batch import BatchPlan
from worldsize.clock import elapsed_ms, stamp
from worldsize.parallel.base import Exchange, Strategy
from worldsize.track.base import Step
from worldsize.world import World

if TYPE_CHECKING:
    from worldsize.clock import Stamp


@dataclass(frozen=True)
class _Pending:
    step: int
    epoch: float
    lr: float
    values: torch.Tensor
    data_s: float
    interval: tuple[Stamp, Stamp]
    exchange: Exchange

    def costs(self) -> list[float]:
        """Milliseconds of the step, of waiting for data, and of communication; bytes sent."""
        return [elapsed_ms(*self.interval), self.data_s * 1000, self.exchange.milliseconds(), self.exchange.sent_bytes]


class Meter:
    """Collects the metrics of `track.base.Step` without a device synchronization per step.

    ``restart`` starts the clock; each ``add`` ends one step and starts the next.
    """

    def __init__(self, world: World, plan: BatchPlan, strategy: Strategy) -> None:
        self._world = world
        self._plan = plan
        self._strategy = strategy
        self._last = stamp(world.device)
        self._pending: list[_Pending] = []

    def restart(self) -> None:
        """Start timing the next step now, so that it excludes what came before, such as an evaluation."""
        self._last = stamp(self._world.device)

    def add(self, step: int, epoch: float, lr: float, values: torch.Tensor, data_s: float) -> None:
        """Record a completed step.

        Args:
            values: (3,) on the device: loss and correct predictions, summed over this rank's samples; gradient norm.
            data_s: seconds spent waiting for images.
        """
        now = stamp(self._world.device)
        self._pending.append(_Pending(step, epoch, lr, values, data_s, (self._last, now), self._strategy.exchange.take()))
        self._last = now

    def collect(self, broken: int) -> list[Step]:
        """The steps since the last call, over all ranks. All ranks must call it at the same step; waits for the device."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        values = torch.stack([p.values for p in pending]).to("cpu", torch.float64)
        own = torch.cat([values, torch.tensor([p.costs() for p in pending], dtype=torch.float64)], dim=1)
        everyone = [own]
        if self._world.control is not None:
            everyone = [torch.empty_like(own) for _ in range(self._world.size)]
            dist.all_gather(everyone, own, group=self._world.control)
        ranks = torch.stack(everyone)
        return [self._step(p, ranks[:, i].tolist(), broken) for i, p in enumerate(pending)]

    def _step(self, pending: _Pending, ranks: list[list[float]], broken: int) -> Step:
        loss, correct, norm, step_ms, data_ms, wait_ms, sent = (sum(column) for column in zip(*ranks, strict=True))
        n = len(ranks)
        step_ms, data_ms, wait_ms = step_ms / n, min(data_ms, step_ms) / n, min(wait_ms, step_ms) / n
        own_ms = [max(rank[3] - rank[5], 1e-6) for rank in ranks]
        return Step(
            step=pending.step,
            epoch=pending.epoch,
            loss=loss / self._plan.global_batch,
            top1=correct / self._plan.global_batch,
            lr=pending.lr,
            grad_norm=norm / n,
            images_per_s=self._plan.global_batch / max(step_ms, 1e-6) * 1000,
            rank_images_per_s=[self._plan.per_process / ms * 1000 for ms in own_ms],
            step_ms=step_ms,
            data_ms=data_ms,
            compute_ms=max(step_ms - data_ms - wait_ms, 0.0),
            communication_ms=wait_ms,
            sent_bytes=round(sent / n),
            broken=broken,
        )
