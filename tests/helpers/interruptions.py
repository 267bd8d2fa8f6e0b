"""A small run that tests interrupt, and what must be equal if nothing was lost."""

from __future__ import annotations

from pathlib import Path

from paths import SMALL_NETWORK
from processes import Forked, identical, losses, momentum, records, start_sabotaged, weights
from waiting import until

SETTINGS = (
    *("--data.name", "synthetic", "--data.samples", "216", "--data.classes", "10"),
    *("--model.name", SMALL_NETWORK, "--epochs", "3", "--global-batch", "24", "--micro-batch", "6"),
    *("--precision", "fp32", "--deterministic", "--track.every-seconds", "0", "--optimizer.lr", "0.01"),
)
STEPS = 27


def start_until(cwd: Path, name: str, procs: int, step: int, *more: str, rule: str = "unhurried") -> Forked:
    """Start a run in the background, with a rule of sabotage.py, and wait until it has done ``step`` steps.

    By default it takes its time from then on, so that it cannot end before the test does something to it.
    """
    words = ("train", "digits", *SETTINGS, "--procs", str(procs), "--name", name, *more)
    process = start_sabotaged(rule, *words, cwd=cwd, UNHURRIED_AFTER=str(step))
    metrics = cwd / "runs" / name / "metrics.jsonl"
    until(
        lambda: metrics.exists() and metrics.read_text().count('"step", ') >= step,
        f"the run has done {step} steps", running=process,
    )  # fmt: skip
    return process


def same_run(a: Path, b: Path) -> None:
    assert identical(weights(a), weights(b))
    assert identical(momentum(a), momentum(b))
    assert losses(a) == losses(b)
    plain = ("epoch", "step", "train_loss", "train_top1", "val_loss", "val_top1", "val_top5", "val_samples")
    assert [[r[k] for k in plain] for r in records(a, "epoch")] == [[r[k] for k in plain] for r in records(b, "epoch")]
