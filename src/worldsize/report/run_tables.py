"""What the tables of a page say of its runs: results, and the time to each accuracy. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from worldsize.pages import Rows
from worldsize.report import measures, statistics
from worldsize.report.measures import Measure
from worldsize.report.reading import Record, Run


def results(runs: Sequence[Run]) -> Rows:
    """One row per run; each measure of the runs has columns of its own."""
    known = measures.every(runs)
    scores = [title for measure in known for title, _ in _scores(runs[0], measure)]
    titles = ("run", "seed", "processes", "epochs", *scores, "last loss", "median images/s", "minutes")
    rows = []
    for run in runs:
        steps, epochs = statistics.located(run)
        end = max((r.get("minutes") or 0.0 for r in [*steps[-1:], *epochs[-1:]]), default=None)
        values = (
            (run.recipe.get("seed"), "d"),
            (run.steps[-1].get("epoch") if run.steps else None, ".4g"),
            *((value, ".2%") for measure in known for _, value in _scores(run, measure)),
            (epochs[-1].get("val_loss") if epochs else None, ".4f"),
            (statistics.speed(run), ",.4g"),
            (end, ".3g"),
        )
        seed, *others = (number(value, form) for value, form in values)
        rows.append((run.name, seed, _processes(run), *others))
    return [titles, *rows]


def _scores(run: Run, measure: Measure) -> list[tuple[str, float | None]]:
    """Titles and values of the columns of a measure; no values if the run is judged by another."""
    own = measures.of(run) == measure
    last: Record = run.epochs[-1] if own and run.epochs else {}
    best = measures.best(run) if own else None
    return [(f"best {measure.name}", best), *((f"last {one.name}", last.get(one.key)) for one in measure.shown)]


def _processes(run: Run) -> str:
    """``2``; ``2, then 1`` of a run that was resumed with another number."""
    sizes = statistics.processes(run) or [run.environment.get("world_size") or 0]
    return ", then ".join(str(size) for size, _ in groupby(sizes) if size)


def times(runs: Sequence[Run], price_per_hour: float | None) -> Rows:
    """When each run reached round values of its measure, and what that cost."""
    known = measures.every(runs)
    rows = []
    for measure in known:
        name = f"{measure.name} " if len(known) > 1 else ""
        own = [run for run in runs if measures.of(run) == measure]
        for value in statistics.accuracies(own):
            found = [
                _reached(statistics.time_to(run, value), price_per_hour) if measures.of(run) == measure else ""
                for run in runs
            ]
            rows.append((f"{name}{value:.0%}", *found))
    return titled(known[0].name if len(known) == 1 else "accuracy", runs, rows)


def _reached(record: Record | None, price_per_hour: float | None) -> str:
    if record is None:
        return "not reached"
    minutes = record.get("minutes")
    if minutes is None:
        return f"epoch {record['epoch']}"
    cost = f", {record['process_minutes'] / 60 * price_per_hour:,.3g}" if price_per_hour else ""
    return f"epoch {record['epoch']}, {minutes:.3g} min{cost}"


def titled(title: str, runs: Sequence[Run], rows: Rows) -> Rows:
    """The rows below a heading with the name of each run."""
    return [(title, *(run.name for run in runs)), *rows]


def number(value: float | None, form: str) -> str:
    """Nothing for None."""
    return "" if value is None else format(value, form)
