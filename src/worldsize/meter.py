"""Per-step metrics: kept on the device, collected from all ranks together every now and then."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from worldsize.batch import BatchPlan
from worldsize.parallel.base import Strategy
from worldsize.track.base import Step
from worldsize.world import World


@dataclass(frozen=True)
class _Pending:
    step: int
    epoch: float
    lr: float
    values: torch.Tensor
    data_s: float


class Meter:
    """Collects what `track.base.Step` reports, without a device synchronisation per step.

    ``restart`` begins the clock; each ``add`` ends one step and begins the next.
    """

    def __init__(self, world: World, plan: BatchPlan, strategy: Strategy) -> None:
        self._world = world
        self._plan = plan
        self._strategy = strategy
        self._clock = _GpuClock() if world.device.type == "cuda" else _CpuClock()
        self._pending: list[_Pending] = []

    def restart(self) -> None:
        """What came before (an evaluation, say) is not part of the next step's time."""
        self._clock.restart()

    def add(self, step: int, epoch: float, lr: float, values: torch.Tensor, data_s: float) -> None:
        """One step is done; ``values``: (3,) on the device: loss and hits summed over this rank's samples, gradient norm."""
        self._clock.lap()
        self._pending.append(_Pending(step, epoch, lr, values, data_s))

    def collect(self, broken: int) -> list[Step]:
        """The steps since the last call, over all ranks. Every rank must call it at the same step; waits for the device."""
        pending, self._pending = self._pending, []
        waits = self._strategy.communication()
        laps = self._clock.take()
        if not pending:
            return []
        own = torch.zeros(len(pending), 6, dtype=torch.float64)
        own[:, :3] = torch.stack([p.values for p in pending]).to("cpu", torch.float64)
        own[:, 3] = torch.tensor(laps, dtype=torch.float64)
        own[:, 4] = torch.tensor([p.data_s * 1000 for p in pending], dtype=torch.float64)
        if waits:
            own[:, 5] = torch.tensor(waits, dtype=torch.float64)
        everyone = [own]
        if self._world.control is not None:
            everyone = [torch.empty_like(own) for _ in range(self._world.size)]
            dist.all_gather(everyone, own, group=self._world.control)
        ranks = torch.stack(everyone)
        return [self._step(p, ranks[:, i].tolist(), broken) for i, p in enumerate(pending)]

    def _step(self, pending: _Pending, ranks: list[list[float]], broken: int) -> Step:
        loss, hits, norm, step_ms, data_ms, wait_ms = (sum(column) for column in zip(*ranks, strict=True))
        n = len(ranks)
        step_ms, data_ms, wait_ms = step_ms / n, min(data_ms, step_ms) / n, min(wait_ms, step_ms) / n
        own_ms = [max(rank[3] - rank[5], 1e-6) for rank in ranks]
        return Step(
            step=pending.step,
            epoch=pending.epoch,
            loss=loss / self._plan.global_batch,
            top1=hits / self._plan.global_batch,
            lr=pending.lr,
            grad_norm=norm / n,
            images_per_s=self._plan.global_batch / max(step_ms, 1e-6) * 1000,
            rank_images_per_s=[self._plan.per_process / ms * 1000 for ms in own_ms],
            step_ms=step_ms,
            data_ms=data_ms,
            compute_ms=max(step_ms - data_ms - wait_ms, 0.0),
            communication_ms=wait_ms,
            broken=broken,
        )


class _CpuClock:
    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: list[float] = []

    def restart(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self._laps.append((now - self._last) * 1000)
        self._last = now

    def take(self) -> list[float]:
        """Milliseconds of each lap since the last call."""
        laps, self._laps = self._laps, []
        return laps


class _GpuClock:
    def __init__(self) -> None:
        self._last = self._now()
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def restart(self) -> None:
        self._last = self._now()

    def lap(self) -> None:
        now = self._now()
        self._pairs.append((self._last, now))
        self._last = now

    def take(self) -> list[float]:
        pairs, self._pairs = self._pairs, []
        for _, end in pairs[-1:]:
            end.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]

    @staticmethod
    def _now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
