"""How far a run is, from its own metrics (pure)."""

from __future__ import annotations

import json
import math
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
    epochs, max_steps = _asked(recipe)
    words = [f"epoch {last['epoch']:.2f}" + (f" of {epochs:g}" if epochs < math.inf else ""), f"step {last['step']:,}"]
    words.append(f"{speed:,.0f} images/s")
    total = min(max_steps, last["step"] * epochs / last["epoch"] if last["epoch"] > 0 else math.inf)
    if total < math.inf:
        words.append(f"{duration(max(0.0, total - last['step']) * seconds)} left")
    evaluations = [record for record in records if record.get("kind") == "epoch"]
    if evaluations:
        newest = evaluations[-1]
        several = newest.get("val_map") is not None  # labels per image
        score = f"mAP {newest['val_map']:.2%}" if several else f"top-1 {newest['val_top1']:.2%}"
        words.append(f"validation {score} after epoch {newest['epoch']}")
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


def _asked(recipe: str) -> tuple[float, float]:
    """The numbers of epochs and of steps that the recipe asks for at most; infinite if it does not say or cannot be read."""
    try:
        values = yaml.safe_load(recipe)
    except yaml.YAMLError:
        values = None
    values = values if isinstance(values, dict) else {}
    found = (values.get(name) for name in ("epochs", "max_steps"))
    epochs, steps = (float(value) if isinstance(value, (int, float)) else math.inf for value in found)
    return epochs, steps
