"""One process, one device: the reference for all others."""

from __future__ import annotations

from worldsize.parallel import base


class Strategy(base.Strategy):
    name = "single"

    def __init__(self, parts: base.Parts) -> None:
        super().__init__(parts)
