"""Per-step metrics: kept on the device, and collected from all ranks periodically."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


_MOST_RANKS = 16  # whose speeds are reported one by one
_SLOWEST = 4


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

    Args:
        watched: around a wait for the device.
        every_rank: report the speed of each rank, however many there are.
    """

    def __init__(
        self,
        world: World,
        plan: BatchPlan,
        strategy: Strategy,
        watched: Callable[[], AbstractContextManager[None]] = nullcontext,
        every_rank: bool = False,
    ) -> None:
        self._world = world
        self._plan = plan
        self._strategy = strategy
        self._watched = watched
        self._every_rank = every_rank
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
        """The steps since the last call, over all ranks. All ranks must call it at the same step; waits for the device.

        Rank 0 computes them, so that the cost for the other ranks does not depend on their number.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return []
        values = torch.stack([torch.cat([p.computed.sums.reshape(-1), p.norm.double().view(1)]) for p in pending])
        with self._watched():
            values = values.cpu()
        costs = torch.tensor([p.costs() for p in pending], dtype=torch.float64)
        ranks = self._gather(torch.cat([values, costs], dim=1))
        samples = self._gather(torch.tensor([p.computed.samples for p in pending]))
        steps: list[Step] = []
        if ranks is not None and samples is not None:
            steps = [self._step(p, ranks[:, i], samples[:, i], broken) for i, p in enumerate(pending)]
        return self._world.from_main(steps)

    def _gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """Every rank's tensor, (W, ...), on rank 0; None elsewhere."""
        if self._world.control is None:
            return own[None]
        everyone = [torch.empty_like(own) for _ in range(self._world.size)] if self._world.is_main else None
        dist.gather(own, everyone, dst=0, group=self._world.control)
        return None if everyone is None else torch.stack(everyone)

    def _step(self, pending: _Pending, ranks: torch.Tensor, samples: torch.Tensor, broken: int) -> Step:
        """One step of ``ranks`` (W, 2 A + 5): of each micro-batch the loss and the correct predictions; norm; costs."""
        sums = ranks[:, :-5].reshape(-1, 2)
        norms, step_ms, data_ms, wait_ms, sent = ranks[:, -5:].T
        mean_ms = float(step_ms.mean())
        mean_data_ms, mean_wait_ms = (min(float(ms.mean()), mean_ms) for ms in (data_ms, wait_ms))
        speeds = self._plan.per_process / (step_ms - wait_ms).clamp(min=1e-6) * 1000
        return Step(
            step=pending.step,
            epoch=pending.epoch,
            # Exact sums, rounded once: their bits do not depend on how ranks share the micro-batches.
            loss=math.fsum(sums[:, 0].tolist()) / self._plan.global_batch,
            top1=math.fsum(sums[:, 1].tolist()) / self._plan.global_batch,
            lr=pending.lr,
            grad_norm=float(norms.mean()) if self._strategy.local_gradients else float(norms[0]),
            images_per_s=self._plan.global_batch / max(mean_ms, 1e-6) * 1000,
            step_ms=mean_ms,
            data_ms=mean_data_ms,
            compute_ms=max(mean_ms - mean_data_ms - mean_wait_ms, 0.0),
            communication_ms=mean_wait_ms,
            sent_bytes=round(float(sent.mean())),
            broken=broken,
            samples=fingerprint.of_samples(samples.reshape(-1).numpy()),
            **_of_ranks(speeds, self._every_rank),
        )


def _of_ranks(speeds: torch.Tensor, every_rank: bool) -> dict[str, Any]:
    """The fields of `Step` with the speeds of ranks (W,)."""
    if every_rank or len(speeds) <= _MOST_RANKS:
        return {"rank_images_per_s": speeds.tolist()}
    slowest = speeds.topk(_SLOWEST, largest=False)
    return {
        "rank_images_per_s": [],
        "rank_quantiles": speeds.quantile(torch.linspace(0, 1, 5, dtype=speeds.dtype)).tolist(),
        "slowest_ranks": dict(zip(slowest.indices.tolist(), slowest.values.tolist(), strict=True)),
    }
