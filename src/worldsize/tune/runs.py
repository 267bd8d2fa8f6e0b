"""The short runs of ``worldsize tune``, each the recipe itself with another learning rate or batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.errors import Diverged
from worldsize.reproduce import scratch_runs, training_process
from worldsize.reproduce.training_process import ComputationFailed
from worldsize.runs.run_folder import RunFolder

_WARMUP = 0.2  # of a short run


@dataclass(frozen=True)
class Workplace:
    """Where short runs are made: a folder, with ``procs`` processes, of a dataset with so many steps per epoch."""

    folder: Path
    procs: int
    plan: BatchPlan
    steps_per_epoch: int


def losses(place: Workplace, recipe: Recipe, name: str, rates: Sequence[float]) -> list[float | None]:
    """The loss of each step of a run whose step i has the learning rate ``rates[i]``; fewer if it diverges.

    Raises:
        ComputationFailed: the run failed for another reason, or was stopped.
        UserError, StoreUnreachable: its folder takes no files.
    """
    changes = with_rates(recipe, rates, place.steps_per_epoch)
    return [record["loss"] for record in records(place, changes, name, len(rates))]


def with_rates(recipe: Recipe, rates: Sequence[float], steps_per_epoch: int) -> Recipe:
    """The recipe for ``len(rates)`` steps with these learning rates, without averaged weights."""
    values = recipe.model_dump(mode="json")
    peak = max(rates)
    values |= {"epochs": max(math.ceil(len(rates) / steps_per_epoch), 1), "max_steps": None}
    values["optimizer"] |= {"lr": peak, "lr_scaling": "none"}
    values["schedule"] |= {
        "name": "piecewise",
        "milestones": [step / steps_per_epoch for step in range(len(rates))],
        "values": [rate / peak for rate in rates],
        "warmup_epochs": 0,
    }
    values["average"] = {"name": "none"}
    if (unfreeze := recipe.model.unfreeze_epoch) is not None and unfreeze >= values["epochs"]:
        values["model"]["unfreeze_epoch"] = None
    return recipe_files.validate(values, "the short run")


def triangle(peak: float, steps: int) -> list[float]:
    """Rates of a short run: a linear warmup to ``peak``, then linear to almost zero."""
    rise = max(round(_WARMUP * steps), 1)
    return [peak * ((i + 1) / rise if i < rise else (steps - i) / (steps - rise)) for i in range(steps)]


def records(place: Workplace, recipe: Recipe, name: str, steps: int) -> list[dict[str, float]]:
    """The records of the first ``steps`` steps of the recipe; fewer if it diverges.

    Raises:
        ComputationFailed: the run failed for another reason, or was stopped.
        UserError, StoreUnreachable: its folder takes no files.
    """
    path = place.folder / f"{name}.yaml"
    scratch_runs.write_recipe(recipe, path)
    run = RunFolder(place.folder / name)
    try:
        training_process.train([str(path), "--out", str(place.folder), "--name", name], run.metrics, place.procs, steps)
    except ComputationFailed as failed:
        if failed.exit_code != Diverged.exit_code:
            raise
    return scratch_runs.steps_of(run)
