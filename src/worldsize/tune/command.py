"""``worldsize tune RECIPE``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldsize import parallel
from worldsize.config import command_line, output_files, recipe_files
from worldsize.config.recipe import Recipe
from worldsize.config.wording import quoted
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import local_rank_info
from worldsize.distributed.stop_signals import interruptible, temporary_folder
from worldsize.errors import SUCCESS, UserError
from worldsize.reproduce.commands import STOPPED, print_table, tell
from worldsize.reproduce.compare import processes
from worldsize.tune import batches, chart, curve, runs
from worldsize.tune.curve import Curve
from worldsize.tune.options import Tune
from worldsize.tune.runs import Workplace

_SHOWN = 12  # rows of the range test
_BAR = 30  # characters
_MOST_RUNS = 6  # short runs
_SMALLEST, _LARGEST = 1e-20, 1e20  # of --low and --high: the short runs, which go beyond them, stay within a recipe's limits


@dataclass(frozen=True)
class Tuned:
    """The range test, and the mean loss at the end of the short runs by their learning rate; None: it diverged."""

    curve: Curve
    ends: dict[float, float | None]

    @property
    def chosen(self) -> float:
        """The rate with the lowest loss at the end.

        Raises:
            UserError: all short runs diverged.
        """
        finite = {rate: loss for rate, loss in self.ends.items() if loss is not None}
        if not finite:
            raise UserError("all short runs diverged: pass a lower --high")
        return min(finite, key=lambda rate: (finite[rate], rate))


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    source = argv[0] if argv and not argv[0].startswith("-") else None
    if source is None and not command_line.asks_help(argv):
        raise recipe_files.missing("tune")
    base = recipe_files.load(source) if source else Recipe()
    asked = command_line.parse(Tune, argv[1:] if source else argv, Tune(base), f"tune {source or 'RECIPE'}")
    assert source is not None
    _check(asked)
    if Path(source).is_file():
        output_files.check_text(Path(source))  # the new recipe names it
    out = asked.out or Path(f"{Path(source).stem}-tuned.yaml")
    _check_out(out)
    with interruptible(STOPPED), temporary_folder("worldsize-tune-") as folder:
        place = _place(asked, folder)
        if remark := _without_local_steps(asked, place):
            tell(remark)
        if asked.micro_batches:
            print_table(batches.micro_batches(place, asked.settings, asked.micro_batches, tell))
        found = batches.forward_batches(place, asked.settings, place.plan, tell) if asked.forward_batches else {}
        tuned = tune(place, asked.settings, asked, tell)
    _finish(tuned, found, asked, place, source, out)
    return SUCCESS


def _check(asked: Tune) -> None:
    if asked.steps < 20:
        raise UserError(f"--steps {asked.steps}: a range test needs at least 20 steps")
    if not _SMALLEST <= asked.low < asked.high <= _LARGEST:
        allowed = f"between {_SMALLEST:g} and {_LARGEST:g}"
        raise UserError(f"--low {asked.low:g} and --high {asked.high:g}: both must be {allowed}, and the second larger")


def _check_out(out: Path) -> None:
    """Refuse a recipe that would replace a file, itself or with its curve, or that worldsize train would not take."""
    recipe_files.refuse_shipped_name("--out", out)
    image = out.with_suffix(".svg")
    if image == out:
        raise UserError(f"--out {out} would be both the recipe and its curve: pass {out.with_suffix('.yaml')}")
    for path in (out, image):
        if path.exists():
            raise UserError(f"{path} already exists: pass --out NEW.yaml, or remove it")
        output_files.check("--out", path)


def _place(asked: Tune, folder: Path) -> Workplace:
    from worldsize.data import open_dataset

    recipe = asked.settings
    parallel.validate(recipe)
    if parallel.strategy_class(recipe.parallel).asynchronous:
        raise UserError("tune needs a strategy with synchronous steps: pass another --parallel.strategy")
    plan = batch_plan.plan(recipe, 1) if asked.procs == 1 else parallel.batch_plan(recipe, asked.procs)
    dataset = open_dataset(recipe.data, folder / ".cache")
    return Workplace(folder, asked.procs, plan, plan.steps_per_epoch(len(dataset.train)))


def _without_local_steps(asked: Tune, place: Workplace) -> str | None:
    """What to report if all short runs end before the recipe's local steps begin."""
    after = asked.settings.parallel.local_after
    if not after or round(after * place.steps_per_epoch) < asked.steps:
        return None
    return (
        f"all {asked.steps} steps are synchronous, because local steps begin after {after:g} epochs: pass "
        "--parallel.local-after 0 to tune for local steps"
    )


def tune(place: Workplace, recipe: Recipe, asked: Tune, tell: Callable[[str], None]) -> Tuned:
    """Make the range test, then three short runs around what it suggests, and more if the best is the first or the last.

    Raises:
        UserError: the loss is not finite from the start.
        UserError, StoreUnreachable: the temporary folder takes no files.
        ComputationFailed: a run failed, or was stopped.
    """
    rates = curve.geometric(asked.low, asked.high, asked.steps)
    tell(f"range test: {asked.steps} steps with learning rates from {asked.low:g} to {asked.high:g}")
    try:
        found = curve.smoothed(rates, runs.losses(place, recipe, "range", rates))
    except ValueError as error:
        raise UserError(f"range test: {error}; pass a lower --low, or --precision fp32") from None
    ends: dict[float, float | None] = {}
    waiting = curve.neighbours(found.suggested)
    while waiting:
        rate = waiting.pop(0)
        tell(f"short run: {asked.steps} steps with warmup to {rate:g}")
        ends[rate] = _end(runs.losses(place, recipe, f"short-{rate:g}", runs.triangle(rate, asked.steps)), asked.steps)
        if not waiting and len(ends) < _MOST_RUNS:
            waiting = _beyond(ends)
    return Tuned(found, ends)


def _beyond(ends: dict[float, float | None]) -> list[float]:
    """The next rate to try if the best one so far is the lowest or the highest."""
    finite = {rate: loss for rate, loss in ends.items() if loss is not None}
    if not finite:
        return [curve.rounded(min(ends) / 10)]
    best = min(finite, key=lambda rate: (finite[rate], rate))
    if best == max(ends):
        return [curve.rounded(best * 3)]
    return [curve.rounded(best / 3)] if best == min(ends) else []


def _end(losses: Sequence[float | None], steps: int) -> float | None:
    """The mean loss of the last fifth; None if the run diverged."""
    tail = losses[-max(steps // 5, 1) :]
    finite = [loss for loss in tail if loss is not None and math.isfinite(loss)]
    return sum(finite) / len(finite) if len(losses) == steps and len(finite) == len(tail) else None


# Reporting ----------------------------------------------------------------------------------------------------------------


def _finish(tuned: Tuned, speeds: dict[int, float | None], asked: Tune, place: Workplace, source: str, out: Path) -> None:
    chosen = tuned.chosen
    forward_batch = batches.fastest(speeds) if speeds else asked.settings.forward_batch
    if speeds:
        print_table(batches.table(speeds))
    print_table(_rows(tuned.curve))
    rows: list[tuple[str, ...]] = [("short run with lr", "mean loss at its end")]
    rows += [(f"{rate:g}", "diverged" if loss is None else f"{loss:.4f}") for rate, loss in tuned.ends.items()]
    print_table(rows)
    image = out.with_suffix(".svg")
    drawn = chart.svg(tuned.curve, chosen, f"Learning-rate range test of {Path(source).name}")
    recipe = _yaml(chosen, forward_batch, asked, place, source).encode(errors="backslashreplace")  # YAML reads these escapes
    output_files.write_together({image: drawn.encode(), out: recipe})
    print(f"learning rate {chosen:g} for global batches of {_batch(asked)}")
    if speeds:
        print(f"forward batch {forward_batch}, the fastest; it changes the numbers only by rounding")
    print(f"{image}: the curve. {out}: the recipe; worldsize train {quoted(out)}")
    if chosen in (min(tuned.ends), max(tuned.ends)):
        print("It is the lowest or the highest that was tried: a rate beyond it may be better still.")


def _rows(found: Curve) -> list[tuple[str, ...]]:
    low, high = min(found.losses), max(found.losses)
    count = len(found.rates)
    shown = sorted({round(i * (count - 1) / (_SHOWN - 1)) for i in range(_SHOWN)})
    rows: list[tuple[str, ...]] = [("lr", "loss, smoothed", "")]
    for i in shown:
        length = round(_BAR * (found.losses[i] - low) / ((high - low) or 1.0))
        rows.append((f"{found.rates[i]:.2g}", f"{found.losses[i]:.4f}", "#" * length))
    return rows


def _batch(asked: Tune) -> int:
    recipe = asked.settings
    return recipe.global_batch if recipe.per_process_batch is None else recipe.per_process_batch * asked.procs


def _yaml(chosen: float, forward_batch: int | None, asked: Tune, place: Workplace, source: str) -> str:
    base = str(Path(source).resolve()) if Path(source).is_file() else source
    settings = asked.settings.model_dump(mode="json") | {"forward_batch": forward_batch}
    changed = _changed(recipe_files.load(source).model_dump(mode="json"), settings)
    batch = parallel.lr_batch(asked.settings.parallel, place.plan, local_rank_info(asked.procs))
    optimizer = {**changed.pop("optimizer", {}), "lr": chosen, "lr_reference_batch": batch}
    values = {"base": base, **changed, "optimizer": optimizer}
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return f"# worldsize tune: {asked.steps} steps per run, {processes(asked.procs)}\n" + "\n".join(lines) + "\n"


def _changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The settings of the command line, nested as in the recipe."""
    found: dict[str, Any] = {}
    for name, value in new.items():
        before = old[name]
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := _changed(before, value):
                found[name] = inner
        elif value != before:
            found[name] = value
    return found
