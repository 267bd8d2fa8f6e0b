"""One process drives several GPUs: torch's nn.DataParallel.

It is slow: each forward pass copies the model to every GPU and gathers the outputs on the first one, and one interpreter
feeds all of them. It is here for comparison; `ddp` does the same with one process per GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from worldsize.distributed import batch_plan
from worldsize.errors import UserError
from worldsize.parallel import base

if TYPE_CHECKING:
    from worldsize.config.recipe import Parallel, Recipe
    from worldsize.distributed.batch_plan import BatchPlan
    from worldsize.distributed.rank import RankInfo


class Strategy(base.Strategy):
    """nn.DataParallel over all GPUs of this process."""

    name = "dataparallel"
    about = "nn.DataParallel: several GPUs, slow"
    processes = "one"

    @classmethod
    def exact(cls, settings: Parallel) -> bool:
        return True

    @classmethod
    def validate(cls, recipe: Recipe) -> None:
        if recipe.loss.teacher is not None:
            raise UserError(
                "strategy dataparallel does not support loss.teacher, which needs one process per device: "
                "use --parallel.strategy ddp"
            )

    @classmethod
    def check(cls, recipe: Recipe, rank_info: RankInfo) -> None:
        if not base.uses_gpu(recipe):
            raise UserError(
                "strategy dataparallel spreads a batch over GPUs, and this run uses none: "
                "--parallel.strategy ddp with --procs 2 does the same with processes, on CPUs too"
            )

    @classmethod
    def check_size(cls, recipe: Recipe, world_size: int) -> None:
        # Devices share the batch, and only the machine that trains knows their number.
        return

    @classmethod
    def batch_plan(cls, recipe: Recipe, world_size: int) -> BatchPlan:
        import torch

        return batch_plan.plan(recipe, 1, max(1, torch.cuda.device_count()))

    @classmethod
    def support(cls, machine: base.Machine) -> list[base.StrategySupport]:
        one = "" if machine.gpus > 1 else "this machine has one GPU, so there is nothing to spread over"
        return [
            base.StrategySupport(
                cls.name, "cpu", "-", (), "it spreads a batch over GPUs; ddp does the same with processes on CPUs"
            ),
            base.StrategySupport(cls.name, "cuda", "-", (), machine.no_gpu or one),
        ]

    def __init__(self, parts: base.StrategyInputs) -> None:
        from worldsize.parallel.dataparallel.replicas import Replicas

        super().__init__(parts)
        self.module = self._replicas = Replicas(parts.module)

    @contextmanager
    def gradients(self, last: bool) -> Iterator[None]:
        yield
        self._replicas.average_statistics()

    def describe(self) -> str:
        import torch

        return f"{self.name} on {torch.cuda.device_count()} GPUs"
