"""How fast a recipe is with other micro-batches and other forward batches."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from statistics import median

from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.errors import SIGNAL_BASE, UserError
from worldsize.reproduce.training_process import ComputationFailed
from worldsize.tune import runs
from worldsize.tune.runs import Workplace

_STEPS = 6  # that count
_NOT_COUNTED = 2  # steps at the start, when memory is allocated
_KILLED = SIGNAL_BASE + signal.SIGKILL  # by the kernel, most likely because the machine's memory was full
_FULL = "out of GPU memory"  # see `device_errors`


def micro_batches(place: Workplace, recipe: Recipe, text: str, tell: Callable[[str], None]) -> list[tuple[str, ...]]:
    """A table of images/s by micro-batch. ``text``: the micro-batches, separated by commas.

    Raises:
        UserError: ``text`` has something else, or a micro-batch does not fit the recipe.
        ComputationFailed: a run failed.
    """
    rows: list[tuple[str, ...]] = [("micro_batch", "images/s")]
    for size in _numbers(text):
        tell(f"speed: micro-batches of {size}")
        rows.append((str(size), f"{_speed(place, recipe, micro_batch=size, forward_batch=None):,.1f}"))
    return rows


def forward_batches(
    place: Workplace, recipe: Recipe, plan: BatchPlan, tell: Callable[[str], None]
) -> dict[int, float | None]:
    """Images/s by the samples of a forward pass, ascending, up to the first that does not fit into memory (None).

    Raises:
        ComputationFailed: a run failed for another reason.
    """
    found: dict[int, float | None] = {}
    for size in batch_plan.forward_batches(plan):
        tell(f"speed: forward passes of {size} images")
        try:
            found[size] = _speed(place, recipe, forward_batch=size)
        except ComputationFailed as error:
            if found and (error.exit_code == _KILLED or _FULL in str(error)):
                found[size] = None
                break
            raise
    return found


def fastest(found: dict[int, float | None]) -> int:
    """The forward batch with the most images/s."""
    return max((size for size, speed in found.items() if speed is not None), key=lambda size: found[size] or 0.0)


def table(found: dict[int, float | None]) -> list[tuple[str, ...]]:
    """`forward_batches` as rows."""
    shown = [(str(size), "does not fit" if speed is None else f"{speed:,.1f}") for size, speed in found.items()]
    return [("forward_batch", "images/s"), *shown]


def _speed(place: Workplace, recipe: Recipe, **changes: int | None) -> float:
    """Images/s of the recipe with these changes: the median of some steps.

    Raises:
        UserError: the loss is not finite before there are so many.
        ComputationFailed: the run failed for another reason.
    """
    long_enough = {"epochs": max(recipe.epochs, _STEPS + _NOT_COUNTED), "max_steps": None}
    changed = recipe_files.validate(recipe.model_dump(mode="json") | long_enough | changes, "the batch")
    name = "-".join(f"{key}-{value}" for key, value in changes.items())
    records = runs.records(place, changed, name, _STEPS + _NOT_COUNTED)
    if not (counted := records[_NOT_COUNTED:]):
        raise UserError(f"the speed cannot be measured: the loss is not finite with --optimizer.lr {recipe.optimizer.lr:g}")
    return median(record["images_per_s"] for record in counted)


def _numbers(text: str) -> Sequence[int]:
    """Each number once, in the order of ``text``."""
    try:
        return list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise UserError(f"--micro-batches {text!r}: pass numbers such as 16,32,64") from None
