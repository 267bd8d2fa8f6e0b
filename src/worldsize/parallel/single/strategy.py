"""One process, one device: the reference for all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worldsize.parallel import base

if TYPE_CHECKING:
    from worldsize.config.recipe import Parallel


class Strategy(base.Strategy):
    """The plain optimizer step."""

    name = "single"
    sharpens = True
    stable_between_updates = True
    about = "one device: the reference"
    processes = "one"
    captured = True

    @classmethod
    def exact(cls, settings: Parallel) -> bool:
        return True

    @classmethod
    def support(cls, machine: base.Machine) -> list[base.StrategySupport]:
        return [
            base.StrategySupport(cls.name, "cpu", "-", (), ""),
            base.StrategySupport(cls.name, "cuda", "-", (), machine.no_gpu),
        ]

    def __init__(self, parts: base.StrategyInputs) -> None:
        super().__init__(parts)
