"""What a page about runs or a benchmark contains. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import combinations

from worldsize.attribution import advice, causes
from worldsize.config.listing import flat, shown
from worldsize.errors import UserError
from worldsize.pages import Rows, Table
from worldsize.report import (
    bench_charts,
    data,
    differences,
    measures,
    published,
    reading,
    run_charts,
    run_tables,
    statistics,
)
from worldsize.report.page import Page
from worldsize.report.reading import Bench, Plan, Record, Run

_BENCH_COLUMNS = {
    "world_size": "world size",
    "bytes": "message, bytes",
    "global_batch": "global batch",
    "images_per_s": "images/s",
    "images_per_s_per_process": "images/s per process",
    "efficiency": "efficiency",
    "step_ms": "step, ms",
    "data_ms": "data, ms",
    "copy_ms": "copy, ms",
    "compute_ms": "compute, ms",
    "communication_ms": "communication, ms",
    "sent_mb": "sent, MB",
    "slowest_rank": "slowest rank",
    "gpu_busy": "GPU busy",
    "gpu_memory_gb": "GPU memory, GB",
    "gpu_watts": "power, W",
    "images_per_wh": "images/Wh",
    "us": "time, us",
    "bus_gb_per_s": "bus bandwidth, GB/s",
}
_MOST_CAUSES = 3


def of_runs(runs: Sequence[Run], price_per_hour: float | None = None) -> Page:
    """A page about one run, or several of the same dataset; ``price_per_hour`` is that of a process.

    Raises:
        UserError: the runs have different datasets.
    """
    runs = reading.told_apart(runs)
    _check_comparable(runs)
    tables = data.of_runs(runs)
    verdict = statistics.verdict(runs)
    times = run_tables.times(runs, price_per_hour)
    differing = Table("What the recipes differ in", run_tables.titled("setting", runs, differences.recipes(runs)))
    return Page(
        title=", ".join(run.name for run in runs),
        verdict=verdict,
        notes=[note for run in runs for note in _notes(run)] + _failures(runs, verdict),
        figures=run_charts.of_runs(tables, measures.every(runs)),
        tables=[
            Table("Results", run_tables.results(runs)),
            *([Table(f"Time {'and cost ' if price_per_hour else ''}to accuracy", times)] if len(times) > 1 else []),
            *_lost(runs),
            *([differing] if len(differing.rows) > 1 else []),
        ],
        facts=[fact for run in runs for fact in _facts(run)],
        data=tables,
    )


def _check_comparable(runs: Sequence[Run]) -> None:
    """Of every two runs: one that did not record its validation images can be compared with runs that differ in theirs."""
    for one, other in combinations(runs, 2):
        if one.dataset != other.dataset:
            differ = f"datasets ({one.dataset}, {other.dataset})"
        elif one.validation and other.validation and one.validation != other.validation:
            differ = f"validation images (digests {one.validation[:12]}, {other.validation[:12]})"
        else:
            continue
        raise UserError(
            f"{one.name} and {other.name} have different {differ}, so their accuracies cannot be compared: write one report "
            "for each dataset"
        )


def of_benches(benches: Sequence[Bench], plans: Sequence[Plan] = ()) -> Page:
    """A page about benchmarks of one kind, their series side by side; about predictions; or about both.

    Raises:
        UserError: benchmarks of different kinds, two with a series of the same name, or predictions next to a benchmark that
            did not measure world sizes.
    """
    whole = _joined(benches) if benches else None
    if whole is not None and plans and whole.kind != "scaling":
        raise UserError(f"{plans[0].name} predicts world sizes, and {benches[0].name} did not measure them")
    tables = data.of_bench(whole, plans)
    return Page(
        title=", ".join([bench.name for bench in benches] + [plan.name for plan in plans]),
        verdict=" ".join(
            ([statistics.verdict_of_bench(whole)] if whole is not None else [])
            + ([statistics.verdict_of_plans(plans)] if plans else [])
        ),
        notes=[note for bench in benches for note in _bench_notes(bench)],
        figures=bench_charts.of_bench(tables, whole.kind if whole is not None else "scaling"),
        tables=[
            *([Table("Medians over rounds", _medians(whole))] if whole is not None else []),
            *(Table(f"Predictions: {plan.name}", _predictions(plan)) for plan in plans),
            *([_published()] if any(table.name == "efficiency" for table in tables) else []),
        ],
        facts=[_command(bench) for bench in benches if bench.facts],
        data=tables,
    )


def _joined(benches: Sequence[Bench]) -> Bench:
    first = benches[0]
    for one, other in combinations(benches, 2):
        same = _series(one) & _series(other)
        if one.kind != other.kind or same:
            why = f"both measured {min(same)}" if same else "they measured different things"
            raise UserError(f"{one.name} and {other.name} cannot share a page: {why}; write a report of each")
    results: list[Record] = []
    steps: dict[int, list[Record]] = {}
    for bench in benches:
        steps |= {len(results) + index: records for index, records in bench.steps.items()}
        results += bench.results
    return Bench(first.path, first.facts, results, sum(bench.damaged for bench in benches), steps=steps)


def _published() -> Table:
    titles = ("published result", "GPUs", "efficiency", "source")
    rows = [(one.system, str(one.processes), f"{one.efficiency:.1%}", one.source) for one in published.RESULTS]
    return Table("Published results", [titles, *rows])


def _predictions(plan: Plan) -> Rows:
    titles = ("devices", "images/s per device", "efficiency", "step, ms", "hours", "price", "bottleneck")
    rows = []
    for one in plan.forecasts:
        devices = one["devices"]
        price = one.get("price")
        rows.append(
            (
                str(devices),
                _range(one["images_per_s"], 1 / devices, ",.4g"),
                _range(one["efficiency"], 1, ".1%"),
                _range(one["step_s"], 1000, ",.4g"),
                _range(one["duration_s"], 1 / 3600, ",.3g"),
                "" if price is None else _range(price, 1, ",.4g"),
                str(one["bottleneck"]),
            )
        )
    return [titles, *rows]


def _range(values: Record, unit: float, form: str) -> str:
    value, low, high = (format(values[key] * unit, form) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _series(bench: Bench) -> set[str]:
    return {statistics.series(result) for result in bench.results}


def _command(bench: Bench) -> Table:
    facts = [(name, shown(value)) for name, value in flat(bench.facts).items()]
    return Table(f"{bench.name}: command and environment", [("name", "value"), *facts])


def _bench_notes(bench: Bench) -> list[str]:
    notes = _damage(bench.name, "results.jsonl", bench.damaged)
    for one in bench.failed:
        size = f"{one.get('nodes')} x {one.get('procs')}"
        notes.append(f"{bench.name}: {statistics.series(one)}, {size}, round {one.get('round')}, failed: {one['failed']}")
    for size, shared in sorted({(r["world_size"], r["shares"]) for r in bench.results if r.get("shares")}):
        notes.append(
            f"{bench.name}: with world size {size}, the processes of a node share {shared}. It is oversubscribed: its speed "
            "says nothing about scaling, and it has no efficiency."
        )
    if "warmup" in bench.facts:
        notes.append(
            f"{bench.name}: steps of warm-up at the start of each run, which do not count: {bench.facts['warmup']}."
        )
    return notes


def _notes(run: Run) -> list[str]:
    notes = _damage(run.name, "metrics.jsonl", run.damaged)
    if not run.steps:
        notes.append(f"{run.name} {'evaluated its initial weights' if run.result else 'has recorded no steps yet'}.")
    if run.result is None and run.stopped:
        notes.append(f"{run.name} {run.stopped}.")
    return notes


def _failures(runs: Sequence[Run], verdict: str) -> list[str]:
    """Why runs failed, unless the verdict says it."""
    return [f"{run.name} failed: {run.failure}." for run in runs if run.failure is not None and run.failure not in verdict]


def _damage(name: str, file: str, lines: int) -> list[str]:
    what = "1 line is" if lines == 1 else f"{lines} lines are"
    return [f"{name}: {what} incomplete in {file}, as after a crash; the page shows the others."] if lines else []


def _lost(runs: Sequence[Run]) -> list[Table]:
    """What each run lost most time to, and what would help; since it was resumed at its newest world size, if it was."""
    rows = []
    for run in runs:
        if run.evidence is None:
            continue
        seen = run.evidence
        found = [advice.on(loss, seen) for loss in causes.losses(seen) if loss.lost >= advice.WORTH]
        found = sorted((one for one in found if one.saved >= advice.WORTH), key=lambda one: -one.saved)
        name = run.name if not seen.left_out else f"{run.name}, after step {seen.left_out:,}"
        rows += [(name, f"{a.loss.lost:.0%}", a.why, a.remedy, f"{a.gain:+.0%}") for a in found[:_MOST_CAUSES]]
    titles = ("run", "of its time", "cause", "remedy", "speed without it")
    return [Table("Lost time", [titles, *rows])] if rows else []


def _facts(run: Run) -> list[Table]:
    settings = [("setting", "value"), *((k, shown(v)) for k, v in flat(run.recipe).items())]
    environment = {name: value for name, value in run.environment.items() if name != "packages"}  # there are hundreds
    machine = [("name", "value"), *((k, shown(v)) for k, v in flat(environment).items())]
    events = [("", "event"), *((_time(event.time), event.text) for event in run.events)]
    tables = [Table(f"{run.name}: recipe", settings), Table(f"{run.name}: environment", machine)]
    return [Table(f"{run.name}: starts, ends and checkpoints", events), *tables] if len(events) > 1 else tables


def _time(time: float | None) -> str:
    return "" if time is None else datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _medians(bench: Bench) -> Rows:
    columns = {key: title for key, title in _BENCH_COLUMNS.items() if any(r.get(key) is not None for r in bench.results)}
    groups: dict[tuple[str, int, int], list[Record]] = {}
    for result in bench.results:
        key = (statistics.series(result), result.get("world_size", 0), result.get("bytes", 0))
        groups.setdefault(key, []).append(result)
    rows = [
        (name, *(_cell(key, statistics.middle(group, key)) + _mark(key, group) for key in columns))
        for (name, *_), group in sorted(groups.items())
    ]
    return [("series", *columns.values()), *rows]


def _cell(key: str, value: float | None) -> str:
    counts = ("world_size", "global_batch", "slowest_rank", "bytes")
    return run_tables.number(value, ".1%" if key in ("efficiency", "gpu_busy") else ".0f" if key in counts else ",.4g")


def _mark(key: str, group: Sequence[Record]) -> str:
    return f" ({data.SHARED})" if key == "world_size" and any(r.get("shares") for r in group) else ""
