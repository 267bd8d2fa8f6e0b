"""How replicas agree on one model: one module per strategy, one small interface.

A strategy is one module of this package with a class ``Strategy`` derived from `base.Strategy`, and its name in
`worldsize.recipe.StrategyName`. The loop does not know their names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from worldsize.errors import UserError
from worldsize.recipe import Parallel
from worldsize.world import World

if TYPE_CHECKING:  # what the front door asks of this package must not cost an import of torch
    from torch import nn

    from worldsize.parallel.base import Strategy


def resolve(name: str, world_size: int) -> str:
    """The strategy that runs: ``auto`` is `single` for one process and `ddp` for more.

    Raises:
        UserError: the strategy cannot work at this world size.
    """
    if name == "auto":
        return "single" if world_size == 1 else "ddp"
    if name == "single" and world_size > 1:
        raise UserError(
            f"strategy single is for one process and there are {world_size}: use --parallel.strategy ddp, or --procs 1"
        )
    if name == "ddp" and world_size == 1:
        raise UserError("strategy ddp needs more than one process: add --procs 2 (or more), or use --parallel.strategy auto")
    return name


def build(model: nn.Module, settings: Parallel, world: World) -> Strategy:
    """The recipe's strategy around ``model``."""
    name = resolve(settings.strategy, world.size)
    strategy: Strategy = importlib.import_module(f"worldsize.parallel.{name}").Strategy(model, settings, world)
    return strategy
