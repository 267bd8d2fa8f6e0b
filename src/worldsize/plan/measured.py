"""Measurements to calibrate with: a finished run, or the results of ``bench scaling``."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worldsize.bench.scaling import origin
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.distributed.batch_plan import GPU_BATCH
from worldsize.errors import UserError, of_system
from worldsize.plan.fit import Measurement
from worldsize.plan.forecast import cluster_of
from worldsize.plan.job import Job
from worldsize.plan.model import Cluster
from worldsize.plan.supply import Delivered
from worldsize.report import reading
from worldsize.runs import history

_WARMUP = 3  # steps of a run that are not counted
_LEAST_STEPS = 5
_WAITING = 0.05  # share of a step: a device that waits no longer for images is not limited by its loader
_ONE_ROUND = 0.05  # assumed standard error of a single value, relative
_ALIKE = 0.2  # largest difference between the bytes that were sent and those that the recipe sends


@dataclass(frozen=True)
class Calibration:
    """All that was measured. ``delivered``: by the loaders. ``cpu``: whether the devices were CPU processes. ``level``: see
    `fit.fit`. ``notes``: what could not be read."""

    measurements: tuple[Measurement, ...]
    delivered: tuple[Delivered, ...]
    cpu: bool
    level: float = 0.0
    notes: tuple[str, ...] = ()


def read(folders: Iterable[Path], job: Job, per_node: int) -> Calibration:
    """Read the folders.

    Args:
        per_node: processes on each machine of a run, at most; results of `bench scaling` contain it.

    Raises:
        UserError: no results, of another network, or of a strategy that was not measured.
    """
    found = [_bench(path, job) if (path / "results.jsonl").is_file() else _run(path, job, per_node) for path in folders]
    return Calibration(
        measurements=tuple(m for c in found for m in c.measurements),
        delivered=tuple(d for c in found for d in c.delivered),
        cpu=any(c.cpu for c in found),
        level=max((c.level for c in found), default=0.0),
        notes=tuple(note for c in found for note in c.notes),
    )


# Runs ---------------------------------------------------------------------------------------------------------------------


def _run(path: Path, job: Job, per_node: int) -> Calibration:
    if not (path / "metrics.jsonl").is_file() or not (path / "recipe.yaml").is_file():
        raise UserError(f"--from {path}: neither a run (metrics.jsonl, recipe.yaml) nor a bench folder (results.jsonl)")
    recipe = recipe_files.load(str(path / "recipe.yaml"))
    _check_network(path, recipe, job.recipe)
    facts = _facts(path / "environment.json")
    size, cpu = int(facts["world_size"]), _on_cpu(facts)
    lines, notes = _lines(path / "metrics.jsonl")
    before = history.steps_at_other_sizes(path / "history.jsonl")
    steps = [line for line in lines if line.get("kind") == "step" and line["step"] > before][_WARMUP:]
    if len(steps) < _LEAST_STEPS:
        since = f" since it was resumed at another world size, after step {before:,}" if before else ""
        raise UserError(
            f"--from {path}: the run has {len(steps)} steps after its first {_WARMUP}{since}; {_LEAST_STEPS} are needed"
        )
    if before:
        notes = (*notes, f"{path}: the steps up to {before:,} are left out: the run had another number of processes.")
    own = Job(recipe.model_copy(update={"device": "cpu"}) if cpu else recipe, job.images, job.network)
    plan = own.plan(size)
    cluster = cluster_of(size, per_node)
    measurement = _measurement(path, cluster, own, plan.per_process, plan.accumulation, steps)
    return Calibration((measurement,), (_delivered(cluster, steps, plan.per_process),), cpu, notes=notes)


def _facts(path: Path) -> dict[str, Any]:
    """An environment.json with the number of processes and their devices."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text("utf-8"))
        int(facts["world_size"]), _on_cpu(facts)
    except OSError as error:
        raise of_system(f"--from {path.parent}: {path.name}: {error.strerror}", error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"--from {path.parent}: {path.name} does not say how many processes ran, and on what") from None
    return facts


def _on_cpu(facts: dict[str, Any]) -> bool:
    # Runs of older versions have the number of GPUs only.
    return facts["hardware"]["cuda"] is None if "hardware" in facts else not facts["devices_here"]


def _check_network(path: Path, measured: Recipe, planned: Recipe) -> None:
    for name, of in (
        ("model.name", lambda r: r.model.name),
        ("data.train_crop_size", lambda r: r.data.train_crop_size),
        ("model.stem", lambda r: r.model.stem),
    ):
        if of(measured) != of(planned):
            raise UserError(
                f"--from {path}: measured with {name} {of(measured)}, but the recipe has {of(planned)}: plan that recipe, "
                "or measure this one"
            )


# Benchmarks ---------------------------------------------------------------------------------------------------------------


def _bench(path: Path, job: Job) -> Calibration:
    lines, notes = _lines(path / "results.jsonl")
    lines = [line for line in lines if "step_ms" in line and "world_size" in line]
    if not lines:
        raise UserError(f"--from {path}: results.jsonl has no lines of `bench scaling`")
    measured = _measured_recipe(path)
    _check_network(path, measured, job.recipe)
    job = _with_gradients_of(measured, job)
    kinds = list(dict.fromkeys(str(line.get("kind_of_job")) for line in lines))
    if len(kinds) > 1:
        lines = [line for line in lines if str(line.get("kind_of_job")) == kinds[0]]
        notes = (*notes, f"{path}: of several kinds of jobs, only {kinds[0]} is used.")
    kept = [line for line in lines if line["world_size"] == 1 or _uses(str(line["strategy"]), job.recipe)]
    if all(line["world_size"] == 1 for line in kept) and any(line["world_size"] > 1 for line in lines):
        there = ", ".join(sorted({str(line["strategy"]) for line in lines}))
        raise UserError(
            f"--from {path}: the recipe's strategy was not measured, only {there}: pass --parallel.strategy and compression"
        )
    groups: dict[tuple[int, int, float], list[dict[str, Any]]] = {}
    base = _base(kept)
    for line in _without_drift(kept, base):
        key = (int(line["nodes"]), int(line["procs"]), line["global_batch"] / line["world_size"])
        groups.setdefault(key, []).append(line | {"sent_bytes": 1e6 * line["sent_mb"]})
    cpu = job.recipe.device == "cpu" or _bench_on_cpu(path)
    measurements = []
    for (nodes, procs, size), rows in groups.items():
        forward = job.recipe.micro_batch if cpu else max(job.recipe.micro_batch, GPU_BATCH)
        measurements.append(_measurement(path, Cluster(nodes, procs), job, size, max(1, round(size / forward)), rows))
    delivered = (_delivered(Cluster(nodes, procs), rows, size) for (nodes, procs, size), rows in groups.items())
    return Calibration(tuple(measurements), tuple(delivered), cpu, _error(list(base.values())), notes)


def _measured_recipe(path: Path) -> Recipe:
    """A recipe of the benchmark's runs, or that of its command if they were not kept."""
    for pattern in ("*.yaml", "*/recipe.yaml"):
        if found := sorted(path.glob(pattern)):
            return recipe_files.load(str(found[0]))
    try:
        return origin.read(path).asked.settings
    except UserError as error:
        raise UserError(f"--from {path}: neither a recipe nor bench.json says which network was measured: {error}") from None


def _with_gradients_of(measured: Recipe, job: Job) -> Job:
    """The job with as many gradients per step as were measured: those of sharpness-aware minimization."""
    sharpness = {name: getattr(measured.optimizer, name) for name in ("sam_rho", "sam_every")}
    optimizer = job.recipe.optimizer.model_copy(update=sharpness)
    return replace(job, recipe=job.recipe.model_copy(update={"optimizer": optimizer}))


def _bench_on_cpu(path: Path) -> bool:
    """From what the runs recorded; without that, from the options of the jobs."""
    if facts := [_facts(file) for file in path.glob("*/environment.json")]:
        return any(map(_on_cpu, facts))
    return (path / origin.FILE).is_file() and origin.read(path).on_cpu


def _uses(strategy: str, recipe: Recipe) -> bool:
    """Whether the variant of this name, such as ``horovod MPI`` or ``ddp bf16``, sends what the recipe's strategy sends."""
    settings = recipe.parallel
    name, _, detail = strategy.partition(" ")
    own = "ddp" if settings.strategy in ("auto", "single") else settings.strategy
    compression = detail if name == "ddp" and detail else "none"
    return name == own and compression == settings.compression and ("adasum" in detail) == (settings.op == "adasum")


def _base(rows: list[dict[str, Any]]) -> dict[int, float]:
    """The step of the smallest size in each round, milliseconds."""
    smallest = min(rows, key=lambda row: row["world_size"])
    alike = ("world_size", "nodes", "scaling", "strategy")
    return {row["round"]: row["step_ms"] for row in rows if all(row[key] == smallest[key] for key in alike)}


def _without_drift(rows: list[dict[str, Any]], base: dict[int, float]) -> list[dict[str, Any]]:
    """The rows with times relative to the speed of the machine in their round, as the round's smallest size shows it.

    What sizes have to each other is then as exact as within a round, although a shared machine is faster in one round than
    in another.
    """
    usual = statistics.median(base.values())
    return [
        row | {key: value * usual / base[row["round"]] for key, value in row.items() if key.endswith("_ms")}
        for row in rows
        if row["round"] in base
    ]


# Both ---------------------------------------------------------------------------------------------------------------------


def _measurement(
    path: Path, cluster: Cluster, job: Job, batch: float, passes: int, rows: list[dict[str, Any]]
) -> Measurement:
    """The median over steps or rounds of one size."""
    # Local SGD communicates in few steps, and a second gradient may be as rare: a median would miss them.
    alike = job.traffic.every == 1 and job.traffic.gradients in (1, 2)
    middle = statistics.median if alike else statistics.fmean
    waited_ms = middle([row["communication_ms"] for row in rows])
    computed_ms = middle([_computed_ms(row) for row in rows])
    known = cluster.devices > 1 and all("straggler_ms" in row for row in rows)
    measurement = Measurement(
        cluster=cluster,
        traffic=job.traffic,
        batch=batch,
        passes=passes,
        step_s=(computed_ms + waited_ms) / 1000,
        data_s=middle([row["data_ms"] + row.get("copy_ms", 0.0) for row in rows]) / 1000,
        communication_s=waited_ms / 1000 if cluster.devices > 1 else None,
        straggler_s=min(middle([row["straggler_ms"] for row in rows]), waited_ms) / 1000 if known else None,
        spread=_error([_computed_ms(row) + row["communication_ms"] for row in rows]),
        errors_s=_errors_s(rows) if known and len(rows) > 1 else None,
    )
    _check_bytes(path, middle([row["sent_bytes"] for row in rows]), measurement, job.recipe)
    return measurement


def _computed_ms(row: dict[str, Any]) -> float:
    """What remains of a step without waiting for images, for their copies and for other ranks."""
    return float(row["step_ms"] - row["data_ms"] - row.get("copy_ms", 0.0) - row["communication_ms"])


def _errors_s(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """The standard errors of computing, stragglers and messages, seconds."""
    computed = [_computed_ms(row) for row in rows]
    straggling = [row["straggler_ms"] for row in rows]
    exposed = [row["communication_ms"] - row["straggler_ms"] for row in rows]
    return _of_median(computed) / 1000, _of_median(straggling) / 1000, _of_median(exposed) / 1000


def _error(times: list[float]) -> float:
    """The standard error of the median of ``times``, relative to it."""
    return _of_median(times) / statistics.median(times) if len(times) > 1 else _ONE_ROUND


def _of_median(values: list[float]) -> float:
    """The standard error of a median: for normally distributed values about 1.25 standard deviations / sqrt(n)."""
    return 1.25 * statistics.stdev(values) / math.sqrt(len(values))


def _check_bytes(path: Path, sent: float, measurement: Measurement, recipe: Recipe) -> None:
    """The bytes that a step sent tell whether network and compression are those of the recipe."""
    expected = measurement.traffic.gradients * measurement.traffic.size / measurement.traffic.every
    counted = measurement.cluster.devices > 1 and recipe.parallel.strategy in ("auto", "ddp")
    if counted and abs(sent - expected) > _ALIKE * expected:
        raise UserError(
            f"--from {path}: each process sent {sent / 1e6:,.1f} MB per step, but the recipe sends {expected / 1e6:,.1f} "
            "MB: plan with the same network, strategy and compression"
        )


def _delivered(cluster: Cluster, rows: list[dict[str, Any]], batch: float) -> Delivered:
    """What the loader of each device delivered; it was the limit if waiting for it is what a step loses most to."""
    names = ("step_ms", "data_ms", "copy_ms", "communication_ms")
    middle = {name: statistics.median([row.get(name, 0.0) for row in rows]) for name in names}
    limit = middle["data_ms"] > max(_WAITING * middle["step_ms"], middle["copy_ms"], middle["communication_ms"])
    return Delivered(cluster, 1000 * batch / middle["step_ms"], limit)


def _lines(path: Path) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The complete lines, and a note if there are others, as after a crash."""
    lines, damaged = reading.parse(path.read_text("utf-8", errors="replace"))
    return lines, (f"{path}: {damaged} incomplete line{'s' * (damaged > 1)} not used.",) if damaged else ()
