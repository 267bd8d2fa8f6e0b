"""Synchronous averaging of gradients, in buckets, while the backward pass still runs.

Li et al. 2020, "PyTorch Distributed: Experiences on accelerating data parallel training" (arXiv 2006.15704).
"""

# No `from __future__ import annotations` here: DDP checks the hook's annotations, and they must not be strings.

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from worldsize.parallel import base
from worldsize.recipe import Parallel
from worldsize.world import World


class Strategy(base.Strategy):
    """torch's DistributedDataParallel; the mean of all ranks' gradients, sent once a step."""

    name = "ddp"

    def __init__(self, model: nn.Module, settings: Parallel, world: World) -> None:
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # every rank keeps its own running statistics, see model.RunningStatistics
            bucket_cap_mb=settings.bucket_mb,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        self.module = self._ddp
        self._waits = _GpuWaits() if world.device.type == "cuda" else _CpuWaits()
        self._ddp.register_comm_hook(None, self._reduce)

    def _reduce(  # torch's stubs do not know GradBucket
        self,
        _: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            self._waits.begin()
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    @contextmanager
    def gradients(self, last: bool) -> Iterator[None]:
        if not last:
            with self._ddp.no_sync():
                yield
            return
        yield
        # The backward pass returns when the last bucket is averaged: what lies between is not hidden by compute.
        self._waits.end()

    def settle(self, rehearse: Callable[[], None]) -> None:
        # DDP orders its buckets anew after its first backward pass, and the order decides how a ring adds up.
        # Rehearsing once makes the first step of a fresh or resumed run use the same buckets as all others.
        rehearse()
        self.communication()

    def communication(self) -> list[float]:
        return self._waits.take()


class _CpuWaits:
    """Milliseconds from the last bucket's departure to its return, by the host's clock."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._done: list[float] = []

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self) -> None:
        self._done.append((time.perf_counter() - self._begun) * 1000)

    def take(self) -> list[float]:
        done, self._done = self._done, []
        return done


class _GpuWaits:
    """The same by the GPU's clock: two events a step, read when somebody asks."""

    def __init__(self) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)
        self._begun.record()

    def end(self) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._pairs.append((self._begun, end))

    def take(self) -> list[float]:
        pairs, self._pairs = self._pairs, []
        for _, end in pairs[-1:]:
            end.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]
