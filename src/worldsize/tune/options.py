"""The command line of ``tune``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worldsize.config.command_line import RecipeFlags


@dataclass
class Tune:
    """Find a learning rate for RECIPE in a few short runs, and write a recipe with it.

    First a range test (Smith 2017, arXiv 1506.01186): the learning rate rises with each step from --low to --high, and the
    loss shows where learning begins and where it ends. Then runs with warmup and decay around the rate at which the loss
    fell fastest; the one with the lowest loss at its end decides. The numbers do not depend on --procs.
    """

    settings: RecipeFlags
    procs: int = 1
    """Processes on this machine."""
    steps: int = 100
    """Steps of each run."""
    low: float = 1e-4
    """First learning rate of the range test, for the recipe's own global batch."""
    high: float = 10.0
    """Its last learning rate."""
    micro_batches: str | None = None
    """Also measure the speed of these micro-batches, such as 16,32,64. They change BatchNorm, so none is chosen."""
    forward_batches: bool = False
    """Also measure forward passes of more and more micro-batches, until one does not fit; choose the fastest."""
    out: Path | None = None
    """The new recipe (default: RECIPE-tuned.yaml in the current folder); the curve is put next to it as SVG."""
