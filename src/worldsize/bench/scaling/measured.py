"""What a run of a scaling benchmark measured, and its file (pure but for reading and writing it)."""

from __future__ import annotations

import json
import logging
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from worldsize.bench.launching import RunFailed
from worldsize.bench.scaling.cases import Case
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.optim import schedules
from worldsize.track.base import GPU

log = logging.getLogger(__name__)

PARTS = ("data_ms", "copy_ms", "compute_ms", "transfer_ms", "straggler_ms", "overhead_ms")
_SLOW = 0.95  # of the median rank
_OFTEN = 0.5  # of the steps


@dataclass(frozen=True)
class Measured:
    """One run: means over its counted steps.

    The times of `PARTS` add up to ``step_ms``; ``communication_ms`` is ``transfer_ms`` (communication that the backward
    pass does not hide) plus ``straggler_ms`` (waiting for slower ranks); the others are as in `track.base.Step`.
    ``sent_mb`` is what one process sends per step, 10^6 bytes. ``efficiency`` is relative to the smallest world size of the
    same round, strategy and scaling; None until that is measured. ``slowest_rank`` is the rank that is at least 5 % slower
    than the median rank in half of the steps; None: there is none. ``shares`` is what the processes of a node share because
    it has fewer of it, such as ``2 cores``: the configuration is oversubscribed, and has no efficiency; None: it is not.
    ``run`` is the run's folder next to the file. ``gpu_*`` are means of those of `track.base.Step`, and
    ``images_per_wh`` is what the GPUs' energy buys, images per watt-hour; None: unknown.
    """

    kind_of_job: str
    strategy: str
    scaling: str
    nodes: int
    procs: int
    world_size: int
    round: int
    global_batch: int
    lr: float
    images_per_s: float
    images_per_s_per_process: float
    efficiency: float | None
    step_ms: float
    data_ms: float
    compute_ms: float
    communication_ms: float
    transfer_ms: float
    straggler_ms: float
    overhead_ms: float
    sent_mb: float
    slowest_rank: int | None
    shares: str | None = None
    run: str | None = None
    gpu_watts: float | None = None
    gpu_busy: float | None = None
    gpu_memory_gb: float | None = None
    images_per_wh: float | None = None
    copy_ms: float = 0.0  # older files have it in ``data_ms``

    @property
    def case(self) -> Case:
        return Case(self.strategy, self.scaling, self.nodes, self.procs, self.kind_of_job)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Failure:
    """A run that failed, in the round ``turn``, and why."""

    case: Case
    turn: int
    reason: str

    def record(self) -> dict[str, Any]:
        """As a line of the file."""
        case = asdict(self.case)
        return {"kind_of_job": case.pop("on"), **case, "world_size": self.case.world_size} | {
            "round": self.turn,
            "failed": self.reason,
        }


def shared(case: Case, environment: dict[str, Any]) -> str | None:
    """``Measured.shares``, from what the run recorded of its machine."""
    gpus = environment.get("devices_here")
    places = gpus or environment.get("cores")
    if not isinstance(places, int) or case.procs <= places:
        return None
    return f"{places} {'GPU' if gpus else 'core'}{'s' * (places > 1)}"


def of_steps(case: Case, turn: int, recipe: Recipe, records: Sequence[dict[str, Any]], warmup: int, steps: int) -> Measured:
    """The mean of a run's step records, without the first ``warmup``.

    Raises:
        RunFailed: the run has fewer steps.
    """
    counted = records[warmup : warmup + steps]
    if len(counted) < steps:
        raise RunFailed(
            f"{case}: the run ended after {len(records)} steps, fewer than --warmup {warmup} and --steps {steps}: "
            "raise --epochs or lower --steps"
        )
    mean: dict[str, Any] = {
        key: statistics.fmean(r[key] for r in counted) for key in ("step_ms", "communication_ms", "sent_bytes")
    }
    mean |= {key: statistics.fmean(r[key] for r in counted) for key in PARTS if key not in ("transfer_ms", "copy_ms")}
    mean["copy_ms"] = statistics.fmean(r.get("copy_ms", 0.0) for r in counted)  # older runs have it in data_ms
    images = counted[0]["images_per_s"] * counted[0]["step_ms"] / 1000
    speed = images / mean["step_ms"] * 1000
    mean |= {name: _mean_known([record.get(name) for record in counted]) for name in GPU}
    return Measured(
        kind_of_job=case.on,
        strategy=case.strategy,
        scaling=case.scaling,
        nodes=case.nodes,
        procs=case.procs,
        world_size=case.world_size,
        round=turn,
        global_batch=round(images),
        lr=_peak_lr(recipe, counted[-1], round(images)),
        images_per_s=speed,
        images_per_s_per_process=speed / case.world_size,
        efficiency=None,
        sent_mb=mean.pop("sent_bytes") / 1e6,
        transfer_ms=mean["communication_ms"] - mean["straggler_ms"],
        slowest_rank=_slowest(counted),
        images_per_wh=speed * 3600 / mean["gpu_watts"] if mean["gpu_watts"] else None,
        **mean,
    )


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _peak_lr(recipe: Recipe, record: dict[str, Any], global_batch: int) -> float:
    """The peak learning rate that the step's own belongs to; that of the recipe where the schedule is at 0."""
    done = record["step"]
    part = schedules.factor(recipe.schedule, done - 1, round(done / record["epoch"]), recipe.epochs)
    return record["lr"] / part if part > 0 else schedules.peak_lr(recipe.optimizer, global_batch)


def _slowest(records: Sequence[dict[str, Any]]) -> int | None:
    """The rank that is often the slowest by a margin; None if there is none."""
    late = Counter(rank for rank in map(_late, records) if rank is not None)
    return next((rank for rank, times in late.most_common(1) if times >= _OFTEN * len(records)), None)


def _late(record: dict[str, Any]) -> int | None:
    """The slowest rank of a step if it is late. With many ranks, steps have the slowest and quantiles of all."""
    speeds = dict(enumerate(record["rank_images_per_s"])) or {int(r): v for r, v in record.get("slowest_ranks", {}).items()}
    if not speeds:
        return None
    quantiles = record.get("rank_quantiles")
    middle = quantiles[len(quantiles) // 2] if quantiles else statistics.median(speeds.values())
    rank = min(speeds, key=lambda rank: speeds[rank])
    return rank if speeds[rank] < _SLOW * middle else None


def with_efficiency(results: Sequence[Measured]) -> list[Measured]:
    """The results with their efficiency, where the run that it refers to exists."""
    return [_with_efficiency(one, reference(results, one)) for one in results]


def _with_efficiency(one: Measured, base: Measured | None) -> Measured:
    comparable = base is not None and one.shares is base.shares is None
    ratio = None if base is None or not comparable else one.images_per_s_per_process / base.images_per_s_per_process
    return Measured(**asdict(one) | {"efficiency": ratio})


def reference(results: Sequence[Measured], one: Measured) -> Measured | None:
    """The run of the same round, strategy, scaling and kind of job with the smallest world size of the benchmark."""
    smallest = min(r.world_size for r in results if r.kind_of_job == one.kind_of_job)
    same = ("strategy", "scaling", "round", "kind_of_job")
    alike = (r for r in results if r.world_size == smallest and all(getattr(r, k) == getattr(one, k) for k in same))
    return next(alike, None)


def write(path: Path, results: Sequence[Measured], failures: Sequence[Failure] = ()) -> None:
    """Replace the file by one line of JSON per result, with efficiencies, and per failure."""
    records = [*map(asdict, with_efficiency(results)), *(failure.record() for failure in failures)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    partial = path.with_suffix(".partial")
    partial.write_text(lines, "utf-8")
    partial.replace(path)


def read(path: Path) -> list[Measured]:
    """The results in the file. A damaged line is reported and left out, a failure too: its run is made again.

    Raises:
        UserError: it cannot be read.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; --resume needs the folder of a scaling benchmark") from None
    defaults = {field.name: field.default for field in fields(Measured) if field.default is not MISSING}
    names = {field.name for field in fields(Measured)}
    found = []
    for number, line in enumerate(lines, 1):
        try:
            values = defaults | json.loads(line)
            if "failed" not in values:
                found.append(Measured(**{name: values[name] for name in names}))
        except (ValueError, KeyError, TypeError):
            log.warning("%s: line %d is damaged and not used", path, number)
    return found
