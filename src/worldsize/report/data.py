"""The tables that the charts draw, as CSV. Pure functions."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from worldsize.attribution import causes
from worldsize.config.wording import count
from worldsize.report import measures, published, statistics, timeline
from worldsize.report.reading import Bench, Plan, Record, Run

_TEXT = {"series", "part", "run", "row", "what", "line", "kind", "source", "cores"}
_MEASURES = ("loss", "top1", "lr", "grad_norm")
OWN, SHARED = "a core or GPU for each process", "oversubscribed"
MEASURED, PUBLISHED = "measured", "published, see the table"
# What a step consists of, by the names of `attribution.causes.split`.
STEP_PARTS = {
    "compute_ms": "computing",
    "read_ms": "reading images",
    "decode_ms": "decoding images",
    "copy_ms": "copying images to the GPU",
    "transfer_ms": "transfer between ranks",
    "waiting_ms": "waiting for slower ranks",
    "checkpoint_ms": "checkpoints",
    "metrics_ms": "metrics",
    "loop_ms": "the loop",
    "throttled": "CPU quota",
    "no_cpu": "no free processor",
    "paused": "paused",
    "paging": "paging",
}
_VISIBLE = 0.005  # of a step
_MOST_RANKS = 16  # rows of a run with so many ranks that its steps list only the slowest


@dataclass(frozen=True)
class Data:
    """A table by its name on the page; ``columns`` has each column's type as Vega's CSV parser calls it."""

    name: str
    about: str
    columns: dict[str, str]
    rows: list[Record]

    def csv(self) -> str:
        """The table as CSV, numbers with seven digits, nothing for unknown values."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_shown(row.get(name)) for name in self.columns] for row in self.rows)
        return file.getvalue()


def of_runs(runs: Sequence[Run]) -> list[Data]:
    """The tables of a page about runs: learning curves, speed, and the speed of each rank."""
    size = statistics.bin_size(runs)
    over = f"means over {size} steps" if size > 1 else "every step"
    tables = [
        _data("curves", f"training: {over}; evaluation: each", _curves(runs, size)),
        _data("speed", f"speed and step time: {over}", _speed(runs, size)),
        _data("parts", f"milliseconds of a step on each rank, the mean over {_covered(runs)}", _parts(runs)),
        _data("ranks", "images/s of each rank, of many the slowest, without communication", _ranks(runs)),
        _data("timeline", "starts, ends, checkpoints and evaluations, minutes since the first start", _timeline(runs)),
    ]
    return [table for table in tables if table.rows]


def of_bench(bench: Bench | None, plans: Sequence[Plan] = ()) -> list[Data]:
    """The tables of a page about a benchmark: every measurement; of scaling, also efficiency and speed over the steps."""
    found = [_measurements(bench, plans)]
    if bench is not None and bench.kind == "scaling":
        about = "efficiency of every measurement, and published results"
        found += [_data("efficiency", about, _efficiency(bench)), _data("steps", "images/s at each step", _steps(bench))]
    return [table for table in found if table.rows]


def _measurements(bench: Bench | None, plans: Sequence[Plan]) -> Data:
    """One row per measurement with its series, and one per prediction: images/s of a device and their interval."""
    results = bench.results if bench is not None else []
    scaling = bench is not None and bench.kind == "scaling"
    rows = []
    for result in results:
        cores = {"cores": SHARED if result.get("shares") else OWN} if scaling else {}
        numbers = {k: v for k, v in result.items() if isinstance(v, (int, float))}
        rows.append({"series": statistics.series(result)} | cores | numbers)
    for plan in plans:
        for forecast in plan.forecasts:
            rate, devices = forecast["images_per_s"], forecast["devices"]
            ends = {f"predicted{end}": rate[of] / devices for end, of in (("", "value"), ("_low", "low"), ("_high", "high"))}
            rows.append({"series": f"predicted, {plan.name}", "world_size": devices} | ends)
    return _data("bench", "every measurement and prediction" if plans else "every measurement", rows)


def _efficiency(bench: Bench) -> list[Record]:
    """One row per measured efficiency and, as context, per published one; none if nothing was measured."""
    names = ("world_size", "round", "efficiency")
    known = [r for r in bench.results if isinstance(r.get("efficiency"), (int, float)) and not r.get("shares")]
    rows = [{"kind": MEASURED, "series": statistics.series(r)} | {name: r.get(name) for name in names} for r in known]
    if not rows:
        return []
    return rows + [
        {"kind": PUBLISHED, "series": one.system, "world_size": one.processes, "efficiency": one.efficiency}
        | {"source": one.source}
        for one in published.RESULTS
    ]


def _steps(bench: Bench, most: int = statistics.MOST_POINTS) -> list[Record]:
    """Images/s per process at each step that counted, the mean over the rounds; a line for each series and world size."""
    warmup = bench.facts.get("warmup") or 0
    groups: dict[tuple[str, int], dict[int, list[float]]] = {}
    for index, steps in bench.steps.items():
        result = bench.results[index]
        size = -(-len(steps) // most)
        lines = groups.setdefault((statistics.series(result), result["world_size"]), {})
        for number, step in enumerate(steps[warmup:]):
            lines.setdefault(number // size * size + 1, []).append(step["images_per_s"] / result["world_size"])
    return [
        {"line": f"{name}, {ranks} process{'es' * (ranks > 1)}", "step": step, "images_per_s_per_process": fmean(speeds)}
        for (name, ranks), lines in groups.items()
        for step, speeds in lines.items()
    ]


def _curves(runs: Sequence[Run], size: int) -> list[Record]:
    rows = []
    scores = (one.column for measure in measures.every(runs) for one in measure.shown)
    names = list(dict.fromkeys([*_MEASURES, *scores]))
    for group in statistics.seeds(runs):
        name = group[0].name if len(group) == 1 else f"{group[0].name}, {statistics.counted(group)}"
        places = [statistics.located(run) for run in group]
        training = [statistics.thinned(steps, size) for steps, _ in places]
        evaluations = [[e | {name: e.get(f"val_{name}") for name in names} for e in epochs] for _, epochs in places]
        for part, lines in (("training", training), ("evaluation", evaluations)):
            points = statistics.band(lines, names)
            rows += [{"series": name, "part": part} | point for point in points]
    return rows


def _speed(runs: Sequence[Run], size: int) -> list[Record]:
    rows = []
    for run in runs:
        steps = [step | {"images_per_s": _per_process(step)} for step in statistics.located(run)[0]]
        for step in statistics.thinned(steps, size):
            each = step.pop("images_per_s")
            for name in _MEASURES:
                del step[name]
            rows.append({"run": run.name, "images_per_s_per_process": each} | step)
    return rows


def _per_process(step: Record) -> float | None:
    return speed / (step["processes"] or 1) if (speed := step.get("images_per_s")) else None


def _parts(runs: Sequence[Run]) -> list[Record]:
    rows = []
    for run in runs:
        if run.evidence is None:
            continue
        ranks = {f"rank {rank}": ms for rank, ms in run.evidence.ranks.items()} or {"mean over ranks": run.evidence.mean}
        for rank, ms in ranks.items():
            name = f"{run.name}, {rank}" if len(runs) > 1 else rank
            split = causes.split(ms)
            least = _VISIBLE * run.evidence.mean["step_ms"]
            rows += [{"row": name, "part": part, "ms": split[k]} for k, part in STEP_PARTS.items() if split[k] >= least]
    return rows


def _covered(runs: Sequence[Run]) -> str:
    """The steps that the evidence is about: those since a resume with another number of processes, as `explain` says."""
    several = len(runs) > 1
    found = "each run" if several else "the run"
    for run in runs:
        if run.evidence is not None and run.evidence.left_out:
            first = count(run.evidence.left_out, "step")
            name = f", {run.name}" if several else ""
            found += f"{name} without its first {first}, when it had another number of processes"
    return found


def _timeline(runs: Sequence[Run]) -> list[Record]:
    return [row for run in runs for row in timeline.rows(run, f"{run.name}, " if len(runs) > 1 else "")]


def _ranks(runs: Sequence[Run], most: int = 60) -> list[Record]:
    """The median speed of each rank in at most ``most`` intervals of steps; of many ranks, those that are often slow."""
    rows = []
    for run in runs:
        recorded = [(step["step"], speeds) for step in run.steps if len(speeds := _speeds(step)) > 1]
        often = Counter(rank for _, speeds in recorded for rank in speeds)
        every = all(step.get("rank_images_per_s") for step in run.steps)
        shown = [rank for rank, _ in often.most_common(None if every else _MOST_RANKS)]
        size = -(-len(recorded) // most) or 1
        for at in range(0, len(recorded), size):
            group = recorded[at : at + size]
            for rank in sorted(shown):
                if values := [speeds[rank] for _, speeds in group if rank in speeds]:
                    rows.append({"run": run.name, "step": group[-1][0], "rank": rank, "images_per_s": median(values)})
    return rows


def _speeds(step: Record) -> dict[int, float]:
    """Images/s by rank, as far as the step lists them: all, or of many the slowest."""
    speeds = dict(enumerate(step.get("rank_images_per_s") or ())) or step.get("slowest_ranks") or {}
    return {int(rank): speed for rank, speed in speeds.items() if speed is not None}


def _data(name: str, about: str, rows: list[Record]) -> Data:
    columns = dict.fromkeys(key for row in rows for key in row)
    return Data(name, about, {key: "string" if key in _TEXT else "number" for key in columns}, rows)


def _shown(value: object) -> object:
    return f"{value:.7g}" if isinstance(value, float) else value
