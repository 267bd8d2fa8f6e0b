"""Per-step metrics: kept on the device, and collected from all ranks periodically."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from worldsize import fingerprint
from worldsize.batch import BatchPlan
from worldsize.clock import elapsed_ms, stamp
from worldsize.compute import Computed
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
    computed: Computed
    norm: torch.Tensor
    interval: tuple[Stamp, Stamp]
    exchange: Exchange

    def costs(self) -> list[float]:
        """Milliseconds of the step, of waiting for data, and of communication; bytes sent."""
        return [
            elapsed_ms(*self.interval),
            self.computed.data_s * 1000,
            self.exchange.milliseconds(),
            self.exchange.sent_bytes,
        ]


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

    def add(self, step: int, epoch: float, lr: float, computed: Computed, norm: torch.Tensor) -> None:
        """Record a completed step; ``norm`` is the gradient's, a scalar on the device."""
        now = stamp(self._world.device)
        self._pending.append(_Pending(step, epoch, lr, computed, norm, (self._last, now), self._strategy.exchange.take()))
        self._last = now

    def collect(self, broken: int) -> list[Step]:
        """The steps since the last call, over all ranks. All ranks must call it at the same step; waits for the device."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        values = torch.stack([torch.cat([p.computed.sums.reshape(-1), p.norm.double().view(1)]) for p in pending])
        costs = torch.tensor([p.costs() for p in pending], dtype=torch.float64)
        ranks = self._gather(torch.cat([values.cpu(), costs], dim=1))
        samples = self._gather(torch.tensor([p.computed.samples for p in pending]))
        return [self._step(p, ranks[:, i], samples[:, i], broken) for i, p in enumerate(pending)]

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, (W, ...)."""
        everyone = [own]
        if self._world.control is not None:
            everyone = [torch.empty_like(own) for _ in range(self._world.size)]
            dist.all_gather(everyone, own, group=self._world.control)
        return torch.stack(everyone)

    def _step(self, pending: _Pending, ranks: torch.Tensor, samples: torch.Tensor, broken: int) -> Step:
        """One step of ``ranks`` (W, 2 A + 5): of each micro-batch the loss and the correct predictions; norm; costs."""
        n = len(ranks)
        sums, rest = ranks[:, :-5].reshape(-1, 2), ranks[:, -5:]
        norms, steps_ms, datas_ms, waits_ms, sent = rest.T.tolist()
        step_ms = sum(steps_ms) / n
        data_ms, wait_ms = (min(sum(ms) / n, step_ms) for ms in (datas_ms, waits_ms))
        own_ms = [max(step - wait, 1e-6) for step, wait in zip(steps_ms, waits_ms, strict=True)]
        return Step(
            step=pending.step,
            epoch=pending.epoch,
            # Exact sums, rounded once: their bits do not depend on how ranks share the micro-batches.
            loss=math.fsum(sums[:, 0].tolist()) / self._plan.global_batch,
            top1=math.fsum(sums[:, 1].tolist()) / self._plan.global_batch,
            lr=pending.lr,
            grad_norm=sum(norms) / n if self._strategy.local_gradients else norms[0],
            images_per_s=self._plan.global_batch / max(step_ms, 1e-6) * 1000,
            rank_images_per_s=[self._plan.per_process / ms * 1000 for ms in own_ms],
            step_ms=step_ms,
            data_ms=data_ms,
            compute_ms=max(step_ms - data_ms - wait_ms, 0.0),
            communication_ms=wait_ms,
            sent_bytes=round(sum(sent) / n),
            broken=broken,
            samples=fingerprint.of_samples(samples.reshape(-1).tolist()),
        )
