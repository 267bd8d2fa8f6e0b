"""Synchronous averaging of gradients, in buckets, during the backward pass.

Li et al. 2020, "PyTorch Distributed: Experiences on accelerating data parallel training" (arXiv 2006.15704).
`parallel.ddp.compression` decides how a bucket is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from worldsize.errors import UserError
from worldsize.parallel import base

if TYPE_CHECKING:
    import torch
    from torch import nn

    from worldsize.config.recipe import Parallel, Recipe
    from worldsize.distributed.rank import RankInfo


_MOST_NAMES = 4  # of parameters in a message


class Strategy(base.Strategy):
    """torch's DistributedDataParallel; the mean of all ranks' gradients, sent once per step."""

    name = "ddp"
    sharpens = True
    stable_between_updates = True
    rehearses = True
    about = "averages gradients during backward"
    identity_settings = ("compression", "powersgd_rank", "powersgd_start", "sync_batchnorm")
    settings = ("bucket_mb", "gradient_as_bucket_view", "static_graph", "predivide", *identity_settings)

    @classmethod
    def exact(cls, settings: Parallel) -> bool:
        return settings.compression == "none" and not settings.sync_batchnorm

    @classmethod
    def allows_merged_forward(cls, settings: Parallel) -> bool:
        return not settings.sync_batchnorm  # which takes statistics over the whole forward pass

    @classmethod
    def validate(cls, recipe: Recipe) -> None:
        if recipe.parallel.compression == "powersgd" and recipe.precision == "fp16":
            raise UserError(
                "parallel.compression powersgd adds its error to the next step, which the changing loss scale of fp16 "
                "makes wrong: use --precision bf16 or fp32"
            )
        if recipe.parallel.compression == "powersgd" and recipe.optimizer.sam_rho:
            raise UserError(
                "parallel.compression powersgd adds its error to the next gradient, but of the two gradients of "
                f"optimizer.sam_rho {recipe.optimizer.sam_rho:g} only the second is applied: leave it out, or use "
                "--parallel.compression bf16"
            )

    @classmethod
    def check(cls, recipe: Recipe, rank_info: RankInfo) -> None:
        if recipe.parallel.sync_batchnorm and not base.uses_gpu(recipe):
            raise UserError(
                "--parallel.sync-batchnorm requires GPUs (torch's SyncBatchNorm does not run on CPUs): leave it out; "
                "BatchNorm groups are --micro-batch samples on every device"
            )

    @classmethod
    def variants(cls) -> list[base.Variant]:
        compression = "--parallel.compression"
        return [
            base.Variant(cls.name, ()),
            base.Variant(f"{cls.name} fp16", (compression, "fp16")),
            base.Variant(f"{cls.name} bf16", (compression, "bf16")),
            base.Variant(f"{cls.name} powersgd", (compression, "powersgd", "--parallel.powersgd-start", "2")),
        ]

    def __init__(self, parts: base.StrategyInputs) -> None:
        super().__init__(parts)
        self._parts = parts
        self._wrap()

    def _wrap(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from worldsize.parallel.ddp import compression

        parts, settings, world = self._parts, self._parts.settings, self._parts.world
        if settings.sync_batchnorm:
            synchronize_norms(parts.model)
        self._ddp = DistributedDataParallel(
            parts.module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # every rank keeps its own running statistics, see models.factory.RunningStatistics
            bucket_cap_mb=settings.bucket_mb,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
            find_unused_parameters=parts.skips,
        )
        self.module = self._ddp
        self._compression = settings.compression
        self._hook: compression.Hook
        if settings.compression == "none" and settings.predivide is None:
            self._hook = compression.Builtin(self._ddp, parts.parameters, self.exchange)
            return
        hook = compression.PowerSGD if settings.compression == "powersgd" else compression.Average
        self._hook = hook(parts.model, settings, world.size, self.exchange)
        self._ddp.register_comm_hook(None, self._hook.reduce)

    def parameters_added(self) -> None:
        super().parameters_added()
        # DDP has buckets for the parameters that it began with.
        state = self._hook.state()
        self._parts = replace(self._parts, skips=self._parts.skips_later)
        self._wrap()
        self._hook.load_state(state)

    def describe(self) -> str:
        return self.name if self._compression == "none" else f"{self.name} with {self._compression} gradients"

    @contextmanager
    def gradients(self, last: bool) -> Iterator[None]:
        if not last:
            with self._ddp.no_sync():
                yield
            return
        yield
        # The backward pass returns when the last bucket is averaged: this is the wait that compute does not hide.
        self.exchange.end()

    def prepare_first_step(self, rehearse: Callable[[], None]) -> None:
        # DDP reorders its buckets after its first backward pass, and the order decides how a ring adds up. After one
        # rehearsal the first step of a fresh or resumed run uses the same buckets as all others.
        with self._hook.rehearsing(), self._all_reached():
            rehearse()
        self.exchange.take()

    @contextmanager
    def _all_reached(self) -> Iterator[None]:
        """Around a pass that must compute a gradient of each parameter: DDP waits for them, and fails in the next pass.

        With a static graph, it learns in the first pass which ones it does not get.
        """
        missing: dict[torch.Tensor, str] = {p: name for name, p in self._parts.model.named_parameters() if p.requires_grad}

        def reached(parameter: torch.Tensor) -> None:
            missing.pop(parameter, None)

        hooks = [p.register_post_accumulate_grad_hook(reached) for p in missing]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if missing and not (self._parts.settings.static_graph or self._parts.skips):
            names = ", ".join(list(missing.values())[:_MOST_NAMES]) + (", ..." if len(missing) > _MOST_NAMES else "")
            raise UserError(
                f"the loss does not depend on {names}, and strategy {self.name} waits for the gradient of each parameter: "
                "freeze these parts of the network (--model.freeze), remove them, or pass --parallel.static-graph"
            )

    def state(self) -> dict[str, torch.Tensor]:
        return self._hook.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._hook.load_state(state)


def synchronize_norms(model: nn.Module) -> None:
    """Replace BatchNorm layers by SyncBatchNorm, except frozen ones: torch would convert these too, and they would learn.

    Layers that are replaced already stay.
    """
    from torch.nn import SyncBatchNorm
    from torch.nn.modules.batchnorm import _BatchNorm

    from worldsize.models.freezing import FrozenBatchNorm2d

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, (FrozenBatchNorm2d, SyncBatchNorm)):
                setattr(module, name, SyncBatchNorm.convert_sync_batchnorm(child))
