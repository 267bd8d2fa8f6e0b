"""Per-step metrics and timing: kept on the device, and collected from all ranks periodically."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch

from worldsize.attribution import step_time
from worldsize.data.loading.loader import Work
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.device_timer import elapsed_ms, stamp
from worldsize.distributed.world import World
from worldsize.parallel.base import Exchange, Strategy
from worldsize.runs import step_hashes
from worldsize.track.base import Step, Window
from worldsize.training.device_usage import DeviceUsage, of_all
from worldsize.training.gradients import Computed
from worldsize.training.process_usage import UsageClock

if TYPE_CHECKING:
    from worldsize.distributed.device_timer import Stamp


@dataclass(frozen=True)
class _Pending:
    step: int
    epoch: float
    lr: float
    computed: Computed
    norm: torch.Tensor
    interval: tuple[Stamp, Stamp]
    exchange: Exchange
    outside_s: float

    def costs(self) -> list[float]:
        """Milliseconds of the step, of waiting for data, of communication, outside the step, and of copying; bytes sent."""
        copy_s = self.computed.copy_s()
        return [
            elapsed_ms(*self.interval),
            (self.computed.data_s() - copy_s) * 1000,
            self.exchange.milliseconds(),
            self.outside_s * 1000,
            copy_s * 1000,
            self.exchange.sent_bytes,
        ]


@dataclass(frozen=True)
class _Interval:
    """Successive steps. ``values`` are those of `_Pending` on the host, once ``copied`` has passed; None: at once.

    ``totals`` are the `step_time.TOTALS` of these steps without the wait for the device, ``between`` is
    `track.base.Window.between_s`, and ``gpu`` what `DeviceUsage` took.
    """

    pending: list[_Pending]
    values: torch.Tensor
    copied: torch.cuda.Event | None
    broken: int
    totals: torch.Tensor
    between: dict[str, float]
    gpu: torch.Tensor | None


_COSTS = 6
_Seconds = defaultdict[str, float]  # by what they were spent on


class StepMetrics:
    """Collects the metrics of `track.base.Step` without a device synchronization per step, and `track.base.Window`.

    ``restart`` starts the clock; ``begin`` is called when the computation of a step begins, and ``add`` when it ends.
    ``spending`` is around work that is not a step's computation.

    Args:
        work: what the threads of the training data have done.
        every_rank: report the speed of each rank, however many there are.
        deferred: let `collect` read each interval at the end of the next one.
    """

    def __init__(
        self,
        world: World,
        plan: BatchPlan,
        strategy: Strategy,
        work: Work | None = None,
        every_rank: bool = False,
        deferred: bool = False,
    ) -> None:
        self._world = world
        self._plan = plan
        self._strategy = strategy
        self._every_rank = every_rank
        self._deferred = deferred
        self._pending: list[_Pending] = []
        self._taken: list[_Interval] = []  # not read yet
        self._work = work or Work()
        self._usage = UsageClock()
        self._gpu = DeviceUsage(world.device) if world.device.type == "cuda" else None
        self._spent: _Seconds = defaultdict(float)  # since the last step ended
        self._in_steps: _Seconds = defaultdict(float)  # since the last window, between two steps of an epoch
        self._between: _Seconds = defaultdict(float)  # since the last window, between epochs
        self._ended = time.perf_counter()
        self.restart()

    def close(self) -> None:
        """End the thread that watches for pauses."""
        self._usage.close()

    @contextmanager
    def spending(self, on: str) -> Iterator[None]:
        """Around work on one of `track.base.Window.between_s`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._spent[on] += time.perf_counter() - begin

    def restart(self) -> None:
        """Start timing the next step now, so that it excludes what came before, such as an evaluation."""
        self._last = stamp(self._world.device)
        now = time.perf_counter()
        self._spent["other"] += now - self._ended - sum(self._spent.values())
        _move(self._spent, self._between)
        self._ended = self._began = now
        if self._gpu is not None:
            self._gpu.restart()
        self._since = self._usage.read()
        self._worked = (self._work.reading_s, self._work.decoding_s)

    def begin(self) -> None:
        """The host begins to compute a step. What it did since the last step is the loop's own work."""
        self._began = time.perf_counter()

    def add(self, step: int, epoch: float, lr: float, computed: Computed, norm: torch.Tensor) -> None:
        """Record a completed step; ``norm`` is the gradient's, a scalar on the device."""
        now = stamp(self._world.device)
        # On a GPU it overlaps with what the device still computes.
        outside_s = 0.0 if self._world.device.type == "cuda" else self._began - self._ended
        _move(self._spent, self._in_steps)
        exchange = self._strategy.exchange.take()
        self._pending.append(_Pending(step, epoch, lr, computed, norm, (self._last, now), exchange, outside_s))
        self._last, self._ended = now, time.perf_counter()

    def collect(self, broken: int, rest: bool = True) -> tuple[list[Step], list[Window]]:
        """The steps since the last call, over all ranks, and on rank 0 where their time went; no windows elsewhere.

        All ranks must call it at the same step. Rank 0 computes the result, so that the cost for the other ranks does not
        depend on their number.

        Args:
            rest: wait for the device. Otherwise, if metrics are ``deferred``, the steps are those before the last call:
                the device has passed them, unless it is further behind than an interval.
        """
        due, self._taken = self._taken, [self._take(broken)] if self._pending else []
        if rest or not self._deferred:
            due, self._taken = due + self._taken, []
        found = [self._read(interval) for interval in due]
        return [step for steps, _ in found for step in steps], [window for _, window in found if window is not None]

    def _take(self, broken: int) -> _Interval:
        """The steps since the last call. Starts to copy their values to the host."""
        pending, self._pending = self._pending, []
        values = torch.stack([torch.cat([p.computed.sums.reshape(-1), p.norm.double().view(1)]) for p in pending])
        copied = None
        if values.is_cuda:
            # Only copies to pinned memory return before they are done.
            host = torch.empty_like(values, device="cpu", pin_memory=True)
            values, copied = host.copy_(values, non_blocking=True), torch.cuda.Event()
            copied.record()
        gpu = None if self._gpu is None else self._gpu.take()
        return _Interval(pending, values, copied, broken, self._totals(), self._take_between(), gpu)

    def _read(self, interval: _Interval) -> tuple[list[Step], Window | None]:
        """Its steps and, on rank 0, where their time went; waits until the device has passed them."""
        pending, begin = interval.pending, time.perf_counter()
        if interval.copied is not None:
            interval.copied.synchronize()
        device_wait_ms = torch.tensor([(time.perf_counter() - begin) * 1000], dtype=torch.float64)
        costs = torch.tensor([p.costs() for p in pending], dtype=torch.float64)
        ranks = self._world.to_main(torch.cat([interval.values, costs], dim=1))
        samples = self._world.to_main(torch.tensor([p.computed.samples for p in pending]))
        totals = self._world.to_main(torch.cat([interval.totals, device_wait_ms]))
        gpus = None if interval.gpu is None else self._world.to_main(interval.gpu)
        steps: list[Step] = []
        where = None
        if ranks is not None and samples is not None and totals is not None:
            used = {} if gpus is None else of_all(gpus)
            steps = [self._step(p, ranks[:, i], samples[:, i], interval.broken, used) for i, p in enumerate(pending)]
            times = step_time.Steps(*ranks[:, :, -_COSTS:-1].permute(2, 1, 0))
            where = step_time.window(pending[-1].step, times, totals, interval.between, self._every_rank)
        return self._world.from_main(steps), where

    def rest(self, step: int) -> Window:
        """What happened after the last step, on this rank."""
        self.restart()
        return Window(step, 0, self._take_between(), [], {}, {})

    def _take_between(self) -> dict[str, float]:
        between = dict(self._between)
        self._between.clear()
        return between

    def _totals(self) -> torch.Tensor:
        """This rank's `step_time.TOTALS` since the last call, without the wait for the device."""
        used, work = self._usage.read(), (self._work.reading_s, self._work.decoding_s)
        loaded = [(now - then) * 1000 for now, then in zip(work, self._worked, strict=True)]
        spent = [self._in_steps[name] * 1000 for name in ("checkpoint", "metrics")]
        values = [*loaded, *spent, *astuple(used - self._since)]
        self._since, self._worked = used, work
        self._in_steps.clear()
        return torch.tensor(values, dtype=torch.float64)

    def _step(self, pending: _Pending, ranks: torch.Tensor, samples: torch.Tensor, broken: int, gpu: dict[str, Any]) -> Step:
        """One step of ``ranks`` (W, 2 A + 7): of each micro-batch the loss and the correct predictions; norm; costs."""
        sums = ranks[:, : -_COSTS - 1].reshape(-1, 2)
        norms, step_ms, data_ms, wait_ms, outside_ms, copy_ms, sent = ranks[:, -_COSTS - 1 :].T
        mean_ms = float(step_ms.mean())
        mean_data_ms, mean_wait_ms, mean_outside_ms, mean_copy_ms = (
            min(float(ms.mean()), mean_ms) for ms in (data_ms, wait_ms, outside_ms, copy_ms)
        )
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
            copy_ms=mean_copy_ms,
            compute_ms=max(mean_ms - mean_data_ms - mean_copy_ms - mean_wait_ms - mean_outside_ms, 0.0),
            communication_ms=mean_wait_ms,
            # The slowest rank waits for nobody: what it still waits for is the transfer.
            straggler_ms=mean_wait_ms - min(float(wait_ms.min()), mean_wait_ms),
            overhead_ms=mean_outside_ms,
            sent_bytes=round(float(sent.mean())),
            broken=broken,
            samples=step_hashes.of_samples(samples.reshape(-1).numpy()),
            nonfinite_ranks=_nonfinite(ranks[:, : -_COSTS - 1 : 2]),
            **_of_ranks(speeds, self._every_rank),
            **gpu,
        )


def _move(spent: _Seconds, to: _Seconds) -> None:
    for name, seconds in spent.items():
        to[name] += seconds
    spent.clear()


def _nonfinite(losses: torch.Tensor) -> list[int]:
    """The ranks with a loss that is not finite, of losses (W, A); none if all have one."""
    ranks = (~losses.isfinite()).any(1).nonzero().flatten().tolist()
    return ranks if len(ranks) < len(losses) else []


def _of_ranks(speeds: torch.Tensor, every_rank: bool) -> dict[str, Any]:
    """The fields of `Step` with the speeds of ranks (W,)."""
    if every_rank or len(speeds) <= step_time.MOST_RANKS:
        return {"rank_images_per_s": speeds.tolist()}
    slowest = speeds.topk(step_time.SLOWEST, largest=False)
    return {
        "rank_images_per_s": [],
        "rank_quantiles": speeds.quantile(torch.linspace(0, 1, 5, dtype=speeds.dtype)).tolist(),
        "slowest_ranks": dict(zip(slowest.indices.tolist(), slowest.values.tolist(), strict=True)),
    }
