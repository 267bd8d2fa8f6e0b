"""Compares the strategies that work on this machine, on the same model and batch: real runs, interleaved in rounds.

The speed of a machine drifts, so strategies are compared within a round.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from worldsize.bench import tables
from worldsize.bench.launching import train_here
from worldsize.bench.options import BenchStrategies
from worldsize.distributed.rank import cores
from worldsize.errors import UserError
from worldsize.parallel import STRATEGIES, load
from worldsize.parallel.availability import support
from worldsize.parallel.base import Variant
from worldsize.runs.run_folder import RunFolder, create

REFERENCE = "ddp"
_WARMUP = 3  # steps that are not counted


@dataclass(frozen=True)
class Measured:
    """One run: means over its counted steps; ``sent_mb`` is what one process sends per step, 10^6 bytes."""

    variant: str
    round: int
    images_per_s: float
    step_ms: float
    communication_ms: float
    sent_mb: float


def variants(procs: int) -> list[Variant]:
    """The variants that can run on this machine with this many processes."""
    usable = {(way.strategy, way.backend) for way in support() if not way.missing}
    paired = procs & (procs - 1) == 0
    return [
        variant
        for name, strategy in ((name, load(name)) for name in STRATEGIES)
        if strategy.processes != "one"
        for variant in strategy.variants()
        if (paired or not variant.pairs)
        and any(name == usable_name and variant.backend in (None, backend) for usable_name, backend in usable)
    ]


def run(arguments: BenchStrategies, tell: Callable[[str], None]) -> RunFolder:
    """Measure and report each run with ``tell``; writes ``results.jsonl``, ``table.md`` and the runs to a new folder.

    Raises:
        UserError: one process, or a run that failed.
    """
    if arguments.procs < 2:
        raise UserError("comparing strategies requires several processes: pass --procs 2 or more")
    if arguments.steps <= _WARMUP:
        raise UserError(f"--steps {arguments.steps}: the first {_WARMUP} are not counted, so pass more")
    if arguments.rounds < 1:
        raise UserError(f"--rounds {arguments.rounds} must be at least 1")
    there = variants(arguments.procs)
    if unknown := set(arguments.only) - {v.name for v in there}:
        raise UserError(
            f"--only {sorted(unknown)[0]!r} is unknown or does not work here; available: {', '.join(v.name for v in there)}"
        )
    chosen = [v for v in there if not arguments.only or v.name in (REFERENCE, *arguments.only)]
    folder = create(arguments.out, None, "bench-strategies")
    results = []
    for turn in range(1, arguments.rounds + 1):
        # Every second round in reverse order, so that a slow drift affects all alike.
        for variant in chosen if turn % 2 else reversed(chosen):
            results.append(_measure(variant, turn, arguments, folder.path))
            tell(f"round {turn}/{arguments.rounds}  {variant.name:<20} {results[-1].images_per_s:8.2f} images/s")
            with open(folder.path / "results.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(results[-1])) + "\n")
    (folder.path / "table.md").write_text(table(results) + "\n", "utf-8")
    return folder


def _measure(variant: Variant, turn: int, arguments: BenchStrategies, folder: Path) -> Measured:
    name = f"{variant.name.replace(' ', '-')}-{turn}"
    batch = arguments.batch * arguments.procs
    # One epoch, so that no evaluation or checkpoint interrupts the steps; images that need no cropping.
    settings = {
        "data.name": "synthetic",
        "data.samples": batch * arguments.steps,
        "data.train-crop": "none",
        "data.train-crop-size": arguments.size,
        "data.val-resize-size": 32,
        "data.val-crop-size": 32,
        "model.name": arguments.model,
        "epochs": 1,
        "global-batch": batch,
        "micro-batch": arguments.batch,
        "precision": arguments.precision,
        "out": folder,
        "name": name,
    }
    words = ["imagenet", "--data.no-flip", "--schedule.warmup-epochs", "0", "--optimizer.lr", "0.001"]
    words += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    metrics = folder / name / "metrics.jsonl"
    train_here(variant, arguments.procs, max(1, cores() // arguments.procs), words, metrics, arguments.steps)
    return _read(variant.name, turn, metrics, batch)


def _read(name: str, turn: int, metrics: Path, batch: int) -> Measured:
    lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "step"][_WARMUP:]
    means = {key: statistics.fmean(s[key] for s in steps) for key in ("step_ms", "communication_ms", "sent_bytes")}
    step_ms = means["step_ms"]
    return Measured(name, turn, batch / step_ms * 1000, step_ms, means["communication_ms"], means["sent_bytes"] / 1e6)


def table(results: list[Measured]) -> str:
    """A Markdown table of medians over the rounds; the ratio is the median of the ratios to `ddp` within each round."""
    reference = {r.round: r.images_per_s for r in results if r.variant == REFERENCE}
    rows = [("strategy", "images/s", "relative to ddp", "sent per step, MB", "waiting for others, ms")]
    for name in dict.fromkeys(r.variant for r in results):
        own = [r for r in results if r.variant == name]
        images, sent, wait = (
            statistics.median(getattr(r, k) for r in own) for k in ("images_per_s", "sent_mb", "communication_ms")
        )
        ratio = statistics.median(r.images_per_s / reference[r.round] for r in own)
        rows.append((name, f"{images:.2f}", f"{ratio:.3f}", f"{sent:.1f}", f"{wait:.0f}"))
    return tables.table(rows)
