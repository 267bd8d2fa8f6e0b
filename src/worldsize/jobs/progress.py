"""How far a run is, from its own metrics (pure)."""

from __future__ import annotations

import json
from typing import Any

import yaml

TAIL = 64 * 1024  # bytes of metrics.jsonl that are enough
_STEPS = 50  # over which the speed is averaged


def progress(metrics: str, recipe: str) -> str | None:
    """One line: epoch, speed, estimated time left (without evaluations), and the newest validation result.

    Args:
        metrics: the end of metrics.jsonl; an incomplete first or last line is skipped.
        recipe: the run's recipe as YAML.

    Returns:
        None if no step is recorded.
    """
    records = [record for line in metrics.splitlines() if (record := _parsed(line)) is not None]
    steps = [record for record in records if record.get("kind") == "step"][-_STEPS:]
    if not steps:
        return None
    last = steps[-1]
    seconds = sum(step["step_ms"] for step in steps) / len(steps) / 1000
    speed = sum(step["images_per_s"] for step in steps) / len(steps)
    epochs = _epochs(recipe)
    words = [f"epoch {last['epoch']:.2f}" + (f" of {epochs:g}" if epochs else ""), f"step {last['step']:,}"]
    words.append(f"{speed:,.0f} images/s")
    if epochs and last["epoch"] > 0:
        left = last["step"] * max(0.0, epochs / last["epoch"] - 1) * seconds
        words.append(f"{duration(left)} left")
    evaluations = [record for record in records if record.get("kind") == "epoch"]
    if evaluations:
        words.append(f"validation top-1 {evaluations[-1]['val_top1']:.2%} after epoch {evaluations[-1]['epoch']}")
    return ", ".join(words)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _epochs(recipe: str) -> float:
    """The number of epochs that the recipe asks for; 0 if it cannot be read."""
    try:
        value = yaml.safe_load(recipe)["epochs"]
    except (yaml.YAMLError, KeyError, TypeError):
        return 0
    return float(value) if isinstance(value, (int, float)) else 0
