"""``worldsize explain RUN``: where a run's time went, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from worldsize import parallel
from worldsize.attribution import advice, causes, evidence, verdict
from worldsize.attribution.advice import Advice
from worldsize.attribution.evidence import Evidence
from worldsize.attribution.step_time import PARTS
from worldsize.config import command_line, recipe_files
from worldsize.config.recipe import Recipe
from worldsize.config.wording import count
from worldsize.distributed import batch_plan
from worldsize.distributed.stop_signals import ends_at_once, temporary_folder
from worldsize.errors import SUCCESS, UserError, WorldsizeError
from worldsize.runs.atomic import write_json
from worldsize.runs.run_folder import open_existing
from worldsize.training import environment

if TYPE_CHECKING:
    from rich.table import Table

_SMALL = 32  # images per forward pass: more may be faster
_COMPUTING = 0.3  # of the run's time: less is not worth measuring
_COLUMNS = {
    **dict(zip(PARTS, ("read", "decode", "copy", "compute", "transfer", "waiting", "save", "metrics", "loop"), strict=True)),
    **{"throttled": "quota", "no_cpu": "no CPU", "paused": "paused", "paging": "paging"},
}


@dataclass
class Explain:
    """Say where a run's time went on each rank, what it lost most to, what would help, and how much.

    If its forward passes are small and it ran on a machine like this one, larger ones are measured: a few short runs.
    The run is not changed.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of the run, which may still be running."""
    measure: bool = True
    """Measure larger forward passes if they may help."""
    json: Path | None = None
    """Also write everything to this file."""


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    if not argv:
        raise UserError("RUN is required: worldsize explain RUN, a folder such as runs/digits-1")
    asked = command_line.parse(Explain, argv, None, "explain")
    with ends_at_once("the run was not changed"):
        return _explain(asked)


def _explain(asked: Explain) -> int:
    seen = evidence.read(open_existing(asked.run))
    found = [advice.on(loss, seen) for loss in causes.losses(seen)]
    shown = [one for one in found if one.loss.lost >= advice.WORTH]
    if asked.measure:
        shown += _small_passes(seen, lambda text: print(text, flush=True))
    shown.sort(key=lambda one: -one.saved)
    _show(asked.run, seen, shown)
    if asked.json is not None:
        _write(asked.json, seen, shown)
    return SUCCESS


# Measuring ----------------------------------------------------------------------------------------------------------------


def _small_passes(seen: Evidence, tell: Callable[[str], None]) -> list[Advice]:
    """Advice on larger forward passes, if they are faster here; empty if there is nothing to measure."""
    recipe = recipe_files.validate(dict(seen.recipe), "the run's recipe")
    plan = batch_plan.plan(recipe, seen.world_size)
    share = _computing(seen)
    larger = [size for size in batch_plan.forward_batches(plan) if size > plan.forward_batch]
    here = _machine(seen) == environment.device_name("cpu")
    if not (larger and here) or plan.forward_batch >= _SMALL or share < _COMPUTING or not _merges(recipe):
        return []
    from worldsize.tune import batches
    from worldsize.tune.runs import Workplace

    with temporary_folder("worldsize-explain-") as folder:
        place = Workplace(folder, seen.world_size, plan, 1)
        try:
            speeds = batches.forward_batches(place, recipe, plan, tell)
        except WorldsizeError as error:
            tell(f"larger forward passes could not be measured: {error}")
            return []
    best, current = batches.fastest(speeds), speeds[plan.forward_batch]
    gain = (speeds[best] or 0.0) / current - 1 if current else 0.0
    found = advice.forward_batch(best, plan.forward_batch, gain, share)
    return [found] if found.saved >= advice.WORTH else []


def _machine(seen: Evidence) -> str | None:
    """The device of a run that worldsize started on one machine; None if a launcher did, perhaps on several."""
    return seen.environment.get("device") if seen.environment.get("launcher") in evidence.LOCAL_LAUNCHERS else None


def _merges(recipe: Recipe) -> bool:
    return parallel.strategy_class(recipe.parallel).allows_merged_forward(recipe.parallel)


# Showing ------------------------------------------------------------------------------------------------------------------


def _show(path: Path, seen: Evidence, found: list[Advice]) -> None:

    from worldsize.config import tables

    console = tables.console(highlight=False, soft_wrap=True)
    console.print(_headline(path, seen), style="bold")
    if seen.damaged:
        console.print(f"{seen.damaged} damaged lines of timing.jsonl are left out")
    if seen.left_out:
        first = f"{count(seen.left_out, 'step')} {'is' if seen.left_out == 1 else 'are'}"
        console.print(f"The first {first} left out: the run had another number of processes")
    console.print(_shares(seen), "", "Milliseconds of a step, by rank", _by_rank(seen), "", sep="\n")
    if causes.launch_bound(seen):
        console.print(
            "The GPU waits for the host, which launches many small kernels: try --model.compile (unless it is compiled "
            "already), --cuda-graphs, or a larger --micro-batch or --forward-batch; measure with `worldsize bench step`."
        )
    if not found:
        console.print(f"No cause takes {advice.WORTH:.0%} of the time: the processes compute.")
    for number, one in enumerate(found, 1):
        console.print(f"{number}. {one.loss.cause}", style="bold", end=": ")
        console.print(verdict.line(one))


def _headline(path: Path, seen: Evidence) -> str:
    processes = f"{seen.world_size} process{'es' * (seen.world_size > 1)}"
    made = sum(window.steps for window in seen.windows)
    counted = "" if made == seen.steps else f"{seen.steps:,} of "  # without the first window
    took = f"{counted}{count(made, 'step')} in {seen.seconds:,.1f} s"
    return f"{path}: {took} with {processes}, which computed {_computing(seen):.0%} of the time"


def _computing(seen: Evidence) -> float:
    """The share of the run's time, 0 to 1."""
    return causes.split(seen.mean)["compute_ms"] * seen.steps / 1000 / seen.seconds


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for i, title in enumerate(titles):
        table.add_column(title, justify="left" if i == 0 else "right")
    return table


def _shares(seen: Evidence) -> Table:
    table = _table("", "s", "share")
    steps_s = seen.mean["step_ms"] * seen.steps / 1000
    for name, seconds in [("steps", steps_s), *sorted(seen.between_s.items(), key=lambda item: -item[1])]:
        table.add_row(name, f"{seconds:,.1f}", f"{seconds / seen.seconds:.1%}")
    return table


def _by_rank(seen: Evidence) -> Table:
    rows = {str(rank): times for rank, times in seen.ranks.items()} | {"mean": seen.mean}
    parts = {name: causes.split(times) for name, times in rows.items()}
    shown = [part for part in _COLUMNS if any(times[part] >= 0.05 for times in parts.values())]
    table = _table("rank", "step", *(_COLUMNS[part] for part in shown))
    for name, times in rows.items():
        table.add_row(name, f"{times['step_ms']:,.1f}", *(f"{parts[name][part]:,.1f}" for part in shown))
    return table


def _write(path: Path, seen: Evidence, found: list[Advice]) -> None:
    """Everything as JSON: milliseconds, seconds, and shares from 0 to 1."""
    values: dict[str, Any] = {
        "steps": seen.steps,
        "left_out": seen.left_out,
        "seconds": seen.seconds,
        "between_s": seen.between_s,
        "ranks_ms": {rank: {"step_ms": times["step_ms"], **causes.split(times)} for rank, times in seen.ranks.items()},
        "mean_ms": {"step_ms": seen.mean["step_ms"], **causes.split(seen.mean)},
        "causes": [asdict(one) | {"gain": one.gain} for one in found],
    }
    try:
        write_json(path, values)
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from None
