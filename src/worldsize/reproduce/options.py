"""The command lines of ``prove``, ``replay`` and ``audit``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from worldsize.config.command_line import RecipeFlags


@dataclass
class Prove:
    """Run the first steps of RECIPE with several numbers of processes, and compare what they compute.

    Compares the order of samples, losses, gradient norms, weights and BatchNorm statistics, and prints one table. Exits
    with 0 if the strategy keeps its promise (bitwise: the same bits; ddp: the same numbers up to rounding), else with 1.
    Everything runs in a temporary folder.
    """

    settings: RecipeFlags
    procs: str = "1,2,4"
    """Numbers of processes on this machine, separated by commas; the first is the reference."""
    steps: int = 20
    """Steps of each run."""
    strategy: str | None = None
    """Strategy (default: the recipe's; of a recipe with `auto`, bitwise)."""
    interrupt: bool = False
    """Stop each run in the middle, and resume it."""
    against: Literal["torch"] | None = None
    """Also compare with a plain PyTorch loop of one process: losses and weights, up to rounding."""


@dataclass
class Replay:
    """Compute past steps of a run again, from the nearest checkpoint before them, and show what the model saw.

    Reports whether each step matches metrics.jsonl, and writes an HTML page about the first one: the images after cropping
    and augmentation with labels, predictions and losses, and the norms of gradients, weights and updates. Exits with 1 if
    a step that should be bit-identical is not. The run is not changed.
    """

    step: str
    """The step, counted from 1 as in metrics.jsonl, or a range such as 120:125."""
    procs: int | None = None
    """Processes (default: as many as the run had)."""
    from_start: bool = False
    """If no checkpoint is early enough, start at the beginning of the run."""
    out: Path | None = None
    """The page (default: RUN-step-N.html in the current folder)."""


@dataclass
class Audit:
    """Verify a run: its chain of fingerprints, its checkpoints, and parts of it by computing them again.

    Checks that metrics.jsonl, the checkpoints, result.json, recipe.yaml and the dataset belong together. Then computes
    randomly chosen windows between two checkpoints again, and compares their bits; evaluations are not computed again.
    Exits with 0 and a certificate, or with 1 and the first inconsistent step. The run is not changed.
    """

    windows: int = 5
    """Windows to compute again, at most."""
    seed: int | None = None
    """Seed of the choice of windows (default: random, printed)."""
    procs: int | None = None
    """Processes (default: as many as the run had)."""
    out: Path | None = None
    """Also write the certificate to this JSON file."""
