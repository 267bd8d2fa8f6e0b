"""Asynchronous SGD with a parameter server: no worker waits for another.

The loop is `worldsize.training.asynchronous.trainer`, the algorithm `parallel.async_sgd.server`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.distributed import batch_plan
from worldsize.errors import UserError
from worldsize.parallel import base

if TYPE_CHECKING:
    from worldsize.config.recipe import Parallel, Recipe
    from worldsize.distributed.batch_plan import BatchPlan


class Strategy(base.Strategy):
    """The replica of one worker."""

    name = "async"
    about = "a parameter server: no worker waits"
    processes = "any"
    identity_settings = ("max_staleness",)
    settings = identity_settings
    averages = False
    unfreezes = False  # messages have a fixed length, and some are of steps before the epoch
    asynchronous = True

    @classmethod
    def depends_on_world_size(cls, settings: Parallel) -> bool:
        # A checkpoint holds only the server, and workers may come and go.
        return False

    @classmethod
    def validate(cls, recipe: Recipe) -> None:
        if recipe.data.shuffle == "block":
            raise UserError("data.shuffle block is incompatible with strategy async: use --data.shuffle full")

    @classmethod
    def check_size(cls, recipe: Recipe, world_size: int) -> None:
        if max_staleness(recipe.parallel, world_size) < world_size - 1:
            raise UserError(
                f"--parallel.max-staleness {recipe.parallel.max_staleness} with {world_size} processes: at equal speed each "
                f"gradient is {world_size - 1} updates old when it arrives, so all would be dropped; allow at least "
                f"{world_size - 1}"
            )
        super().check_size(recipe, world_size)

    @classmethod
    def batch_plan(cls, recipe: Recipe, world_size: int) -> BatchPlan:
        # Each update is one global batch, computed by one worker.
        return batch_plan.plan(recipe, 1)

    @classmethod
    def support(cls, machine: base.Machine) -> list[base.StrategySupport]:
        # Gradients travel through the hosts, where a peer may disappear.
        return [
            base.StrategySupport(cls.name, "cpu", "gloo", base.LAUNCHERS, machine.no_gloo),
            base.StrategySupport(cls.name, "cuda", "gloo", base.LAUNCHERS, machine.no_gpu or machine.no_gloo),
        ]

    def __init__(self, parts: base.StrategyInputs) -> None:
        super().__init__(parts)
        self._bound = max_staleness(parts.settings, parts.world.size)

    def describe(self) -> str:
        return f"{self.name} (gradients at most {self._bound} updates old)"


def max_staleness(settings: Parallel, world_size: int) -> int:
    """How many updates old a gradient may be; by default 4 per process."""
    return 4 * world_size if settings.max_staleness is None else settings.max_staleness
