"""One process, one device: the reference for all others."""

from __future__ import annotations

from torch import nn

from worldsize.parallel import base
from worldsize.recipe import Parallel
from worldsize.world import World


class Strategy(base.Strategy):
    name = "single"

    def __init__(self, model: nn.Module, settings: Parallel, world: World) -> None:
        self.module = model
