"""What the records of runs say: means, bands over seeds, time to an accuracy, and a verdict. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from worldsize.config.listing import PROSE, flat
from worldsize.config.wording import count
from worldsize.report import measures
from worldsize.report.reading import Bench, Plan, Record, Run
from worldsize.runs import world_sizes

MOST_POINTS = 400  # of one line in a chart
POSITIONS = ("step", "epoch", "images", "minutes")
_SPEEDS = ("images_per_s", "data_ms", "copy_ms", "compute_ms", "communication_ms")
_ACCURACIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.97, 0.98, 0.99)


def settings(run: Run) -> Record:
    """The settings of the run's recipe by dotted name, without the texts about it."""
    return {name: value for name, value in flat(run.recipe).items() if name not in PROSE}


def seeds(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs in groups that differ only in their seed, in the order given."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = (settings(run) | {"seed": None}, run.environment.get("world_size"), run.dataset)
        groups.setdefault(repr(key), []).append(run)
    return list(groups.values())


def counted(runs: Sequence[Run]) -> str:
    """``3 seeds`` of runs that all have another seed, else ``3 runs``."""
    values = {run.recipe.get("seed") for run in runs}
    return f"{len(runs)} {'seeds' if len(values) == len(runs) else 'runs'}"


def located(run: Run) -> tuple[list[Record], list[Record]]:
    """The run's steps and evaluations, each also with ``images`` seen and ``minutes`` since the start, and with
    ``process_minutes``, those of all processes. Steps also have the number of ``processes``, 0 if it is not known.

    Time is the sum of the times of steps and evaluations. Pauses, starts and checkpoints do not count.
    """
    evaluations = {e["step"]: e.get("val_s") or 0.0 for e in run.epochs}
    images = 0.0
    before = evaluations.get(0, 0.0) / 60  # of the initial weights
    minutes, paid = before, before * (run.environment.get("world_size") or 1)
    steps, after = [], {0: {"images": 0.0, "minutes": minutes, "process_minutes": paid}}
    for step, ranks in zip(run.steps, processes(run), strict=True):
        taken = (step.get("step_ms") or 0.0) / 1000
        images += _batch(run, ranks) or (step.get("images_per_s") or 0.0) * taken
        minutes, paid = minutes + taken / 60, paid + taken / 60 * (ranks or 1)
        steps.append(step | {"images": images, "minutes": minutes, "process_minutes": paid, "processes": ranks})
        evaluation = evaluations.get(step["step"], 0.0)
        minutes, paid = minutes + evaluation / 60, paid + evaluation / 60 * (ranks or 1)
        after[step["step"]] = {"images": images, "minutes": minutes, "process_minutes": paid}
    return steps, [e | after.get(e["step"], {}) for e in run.epochs]


def processes(run: Run) -> list[int]:
    """How many processes computed each of the run's steps, which may have been resumed with another number; 0: unknown."""
    starts = world_sizes.starts(run.history)
    newest = run.environment.get("world_size") or 0
    return [world_sizes.at(starts, step["step"], newest) for step in run.steps]


def _batch(run: Run, ranks: int) -> int | None:
    """Images of a step on that many processes; None if their number is not known."""
    if (each := run.recipe.get("per_process_batch")) is None:
        return run.recipe.get("global_batch")
    return each * ranks if ranks else None


def thinned(steps: Sequence[Record], size: int) -> list[Record]:
    """The means over every ``size`` steps, at the position of the last of them; None where no value is known."""
    bins: dict[int, list[Record]] = {}
    for step in steps:
        bins.setdefault((step["step"] - 1) // size, []).append(step)
    names = ("loss", "top1", "lr", "grad_norm", *_SPEEDS)
    return [
        {key: group[-1].get(key) for key in POSITIONS} | {name: _mean(s.get(name) for s in group) for name in names}
        for group in bins.values()
    ]


def bin_size(runs: Sequence[Run]) -> int:
    """How many steps one point of a chart stands for: the same for all runs, so that their points meet."""
    longest = max((run.steps[-1]["step"] for run in runs if run.steps), default=1)
    return max(1, math.ceil(longest / MOST_POINTS))


def band(lines: Sequence[Sequence[Record]], names: Sequence[str]) -> list[Record]:
    """One line for several: at each step, the mean of every value, and its minimum and maximum (NAME_low, NAME_high).

    Steps that only some of the lines have are left out: the mean would jump where one ends.
    """
    by_step = [{record["step"]: record for record in line} for line in lines]
    found = []
    for step, first in by_step[0].items():
        if all(step in line for line in by_step):
            point: Record = {key: _mean(line[step].get(key) for line in by_step) for key in ("images", "minutes")}
            point |= {"step": step, "epoch": first.get("epoch")}
            for name in names:
                values = [v for line in by_step if (v := line[step].get(name)) is not None]
                point[name] = _mean(values)
                point[f"{name}_low"], point[f"{name}_high"] = min(values, default=None), max(values, default=None)
            found.append(point)
    return found


def accuracies(runs: Sequence[Run]) -> list[float]:
    """The values to report the time of: at most six round ones, the highest that any of the runs reached."""
    best = max((measures.best(run) or 0.0 for run in runs), default=0.0)
    return [value for value in _ACCURACIES if value <= best][-6:]


def time_to(run: Run, value: float) -> Record | None:
    """The run's first evaluation with at least this value of its measure, with ``minutes``; None if it has none."""
    key = measures.of(run).key
    return next((e for e in located(run)[1] if (e.get(key) or 0.0) >= value), None)


def speed(run: Run) -> float | None:
    """Images/s over all processes: the median over steps, so that the slow first steps do not count."""
    return median(values) if (values := [s["images_per_s"] for s in run.steps if s.get("images_per_s")]) else None


def verdict(runs: Sequence[Run]) -> str:
    """One sentence for the runs of each measure: what came out."""
    groups = [(measure, [run for run in runs if measures.of(run) == measure]) for measure in measures.every(runs)]
    return " ".join(_verdict(group, f"best {measure.name}") for measure, group in groups)


def _verdict(runs: Sequence[Run], best_of: str) -> str:
    scored = [(best, run) for run in runs if (best := measures.best(run)) is not None]
    if len(runs) == 1:
        return _verdict_of_one(runs[0], f"{best_of} {scored[0][0]:.2%}" if scored else None)
    if not scored:
        return f"None of the {len(runs)} runs has been evaluated yet."
    values = [best for best, _ in scored]
    top, winner = max(scored, key=lambda pair: pair[0])
    if len(seeds(runs)) == 1:
        spread = f"{best_of} {fmean(values):.2%} on average, {min(values):.2%} to {top:.2%}"
        return f"{counted([run for _, run in scored])} of one recipe: {spread}."
    behind = max(best for best, run in scored if run is not winner) if len(scored) > 1 else None
    if behind == top:
        return f"{' and '.join(run.name for best, run in scored if best == top)} have the same {best_of}, {top:.2%}."
    lead = f", {100 * (top - behind):.2f} points more than the next" if behind is not None else ""
    return f"{winner.name} has the {best_of}, {top:.2%}{lead}."


def _verdict_of_one(run: Run, reached: str | None) -> str:
    pace = f" Speed: {speed(run) or 0:,.4g} images/s (median of steps)." if run.steps else ""
    done = f"{_epochs(run):.4g} of {count(run.recipe.get('epochs') or 0, 'epoch')}"
    if run.failure is not None:
        return f"{run.name} failed after {done}: {run.failure}. Before: {reached or 'no evaluation'}.{pace}"
    ended = "finished" if run.result else "has not finished: it recorded"
    return f"{run.name} {ended} {done}: {reached or 'no evaluation yet'}.{pace}"


def verdict_of_bench(bench: Bench) -> str:
    """One sentence: the fastest, or how efficient the largest world size is."""
    if bench.kind == "network":
        return _of_network(bench.results)
    if bench.kind == "speed":
        best = max(rates(bench.results).items(), key=lambda item: item[1])
        return f"{best[0]} is the fastest: {best[1]:,.4g} images/s, the median of its rounds."
    known = [r for r in bench.results if r.get("efficiency") is not None and not r.get("shares")]
    if not known:
        return f"Measured up to world size {max(r['world_size'] for r in bench.results)}."
    largest = max(r["world_size"] for r in known)
    efficient = [r for r in known if r["world_size"] == largest]
    groups = sorted({series(r) for r in efficient})
    parts = [f"{name} {median([r['efficiency'] for r in efficient if series(r) == name]):.1%}" for name in groups]
    return f"Efficiency at world size {largest}: {', '.join(parts)}."


def _of_network(results: Sequence[Record]) -> str:
    parts = []
    for name in dict.fromkeys(map(series, results)):
        own = [r for r in results if series(r) == name]
        fastest, smallest = max(own, key=lambda r: r["bus_gb_per_s"]), min(own, key=lambda r: r["bytes"])
        least = f"{smallest['us']:,.4g} us for {smallest['bytes']} bytes"
        parts.append(f"{name}: up to {fastest['bus_gb_per_s']:.3g} GB/s; {least}")
    return f"{'. '.join(parts)}."


def verdict_of_plans(plans: Sequence[Plan]) -> str:
    """One sentence: the predicted efficiency at the largest number of devices."""
    parts = []
    for plan in plans:
        last = max(plan.forecasts, key=lambda forecast: forecast["devices"])
        its = last["efficiency"]
        within = f"{its['low']:.1%} to {its['high']:.1%}"
        parts.append(f"{its['value']:.1%} ({within}) on {last['devices']} devices ({plan.name})")
    return f"Predicted efficiency: {', '.join(parts)}."


def rates(results: Sequence[Record]) -> dict[str, float]:
    """The median images/s by series."""
    return {name: median([r["images_per_s"] for r in results if series(r) == name]) for name in map(series, results)}


def series(result: Record) -> str:
    """The name of what a measurement of a benchmark belongs to."""
    parts = (result.get(key) for key in ("variant", "loader", "form", "kind_of_job", "strategy", "scaling", "through"))
    processes = f"{result['processes']} processes" if "processes" in result else None
    return ", ".join(str(part) for part in (*parts, processes) if part is not None) or "measured"


def _epochs(run: Run) -> float:
    return float(run.steps[-1].get("epoch") or 0) if run.steps else 0.0


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def middle(results: Sequence[Record], name: str) -> float | None:
    """The median of a number over measurements; None if none of them has it."""
    known = [r[name] for r in results if isinstance(r.get(name), (int, float))]
    return median(known) if known else None
