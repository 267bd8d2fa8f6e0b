"""What steps that are computed again must have in common with those that a run recorded. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worldsize import parallel
from worldsize.config.recipe import Recipe
from worldsize.reproduce import compare
from worldsize.reproduce.compare import StepDifference, processes
from worldsize.runs.step_hashes import COVERED

# How far losses and gradient norms of the first step may differ by rounding alone. Later steps amplify the difference.
ROUNDING = {"fp64": 1e-10, "fp32": 1e-4, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}


@dataclass(frozen=True)
class Promise:
    """``no_bits``: why bits may differ although nothing is wrong; empty if they are promised.

    Without bits, the samples and learning rates of all steps are the same, and the loss and gradient norm of the first step
    up to the relative ``tolerance``; None: only the samples.
    """

    no_bits: str = ""
    tolerance: float | None = None

    def __str__(self) -> str:
        if not self.no_bits:
            return "the same bits"
        return "the same samples" + (f", the same numbers up to rounding ({self.tolerance:g})" if self.tolerance else "")

    def broken(self, recorded: list[dict[str, Any]], again: list[dict[str, Any]]) -> StepDifference | None:
        """The first difference that breaks it, between step records that begin with the same step."""
        names = tuple(name for name in COVERED if name in recorded[0])  # older runs have no samples
        if not self.no_bits:
            return compare.first_difference(recorded, again, names)
        same = ("samples", "lr") if self.tolerance else ("samples",)
        found = compare.first_difference(recorded, again, tuple(name for name in same if name in names))
        if found is not None or self.tolerance is None:
            return found
        for name in ("loss", "grad_norm"):
            a, b = recorded[0][name], again[0][name]
            infinite = a is None or b is None  # an overflow of fp16 may be one by rounding
            if not infinite and not math.isclose(a, b, rel_tol=self.tolerance):
                return StepDifference(recorded[0]["step"], name, a, b)
        return None


def of(environment: Mapping[str, Any], recipe: Recipe, recorded_procs: int, procs: int) -> Promise:
    """What a run promises if its steps are computed again with ``procs`` processes instead of ``recorded_procs``.

    Args:
        environment: environment.json of the run.
    """
    strategy = parallel.strategy_class(recipe.parallel)
    if strategy.same_bits:
        return Promise()
    tolerance = ROUNDING[environment["precision"]]
    if procs != recorded_procs:
        why = f"{processes(procs)} computed what {recorded_procs} did, with strategy {strategy.name}"
        return Promise(why, tolerance if strategy.exact(recipe.parallel) else None)
    if environment.get("hardware", {}).get("cuda") and not recipe.deterministic:
        return Promise("the run was on a GPU without --deterministic", tolerance)
    return Promise()
