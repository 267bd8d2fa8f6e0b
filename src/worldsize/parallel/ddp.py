"""Synchronous averaging of gradients, in buckets, while the backward pass still runs.

Li et al. 2020, "PyTorch Distributed: Experiences on accelerating data parallel training" (arXiv 2006.15704).
How a bucket travels is `parallel.hooks`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.parallel import base, hooks


class Strategy(base.Strategy):
    """torch's DistributedDataParallel; the mean of all ranks' gradients, sent once a step."""

    name = "ddp"

    def __init__(self, parts: base.Parts) -> None:
        super().__init__(parts)
        settings, world = parts.settings, parts.world
        if settings.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(parts.model)
        self._ddp = DistributedDataParallel(
            parts.module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # every rank keeps its own running statistics, see model.RunningStatistics
            bucket_cap_mb=settings.bucket_mb,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        self.module = self._ddp
        self._compression = settings.compression
        hook = hooks.PowerSGD if settings.compression == "powersgd" else hooks.Average
        self._hook = hook(parts.model, settings, world.size, self.exchange)
        self._ddp.register_comm_hook(None, self._hook.reduce)

    def describe(self) -> str:
        return self.name if self._compression == "none" else f"{self.name} with {self._compression} gradients"

    @contextmanager
    def gradients(self, last: bool) -> Iterator[None]:
        if not last:
            with self._ddp.no_sync():
                yield
            return
        yield
        # The backward pass returns when the last bucket is averaged: what lies between is not hidden by compute.
        self.exchange.end()

    def settle(self, rehearse: Callable[[], None]) -> None:
        # DDP orders its buckets anew after its first backward pass, and the order decides how a ring adds up.
        # Rehearsing once makes the first step of a fresh or resumed run use the same buckets as all others.
        with self._hook.rehearsing():
            rehearse()
        self.exchange.take()

    def state(self) -> dict[str, torch.Tensor]:
        return self._hook.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._hook.load_state(state)
