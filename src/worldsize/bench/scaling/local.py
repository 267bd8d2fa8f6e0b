"""Runs of a scaling benchmark on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from worldsize.bench import strategies
from worldsize.bench.launching import train_here
from worldsize.bench.scaling.cases import Case
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.parallel.base import Variant


def variant_of(case: Case) -> Variant:
    """The variant that a case names.

    Raises:
        UserError: it is unknown, or does not work here with so many processes.
    """
    found = strategies.variants(max(case.procs, 2))
    for variant in found:
        if case.means(variant):
            return variant
    raise UserError(
        f"--strategies {case.strategy!r} is unknown or does not work here; available: {', '.join(v.name for v in found)}"
    )


def run(case: Case, recipe: Recipe, folder: Path, name: str, steps: int, threads: int) -> Path:
    """Train ``steps`` steps as ``folder``/``name`` with ``threads`` threads per process. Returns the run's metrics.jsonl.

    Raises:
        RunFailed: the run failed.
    """
    shutil.rmtree(folder / name, ignore_errors=True)  # left by an interrupted benchmark
    path = folder / f"{name}.yaml"
    path.write_text(recipe_files.to_yaml(recipe), "utf-8")
    words = [str(path), "--out", str(folder), "--name", name, "--stop-after", str(steps)]
    variant = variant_of(case)
    if case.procs == 1:  # strategies need several processes
        variant = Variant(case.strategy, ())
    metrics = folder / name / "metrics.jsonl"
    train_here(variant, case.procs, threads, words, metrics, steps)
    shutil.rmtree(folder / name / "checkpoints", ignore_errors=True)
    return metrics
