"""metrics.jsonl: one JSON object a line, ``{"kind": "step" | "epoch", ...}``; numbers as in `track.base`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from worldsize.recipe import Track
from worldsize.run import RunFolder
from worldsize.track import base


class Tracker(base.Tracker):
    def __init__(self, settings: Track, folder: RunFolder, resumed_step: int) -> None:
        if folder.metrics.exists():
            _forget_after(folder, resumed_step)
        self._file = open(folder.metrics, "a", encoding="utf-8")

    def steps(self, steps: Sequence[base.Step]) -> None:
        for step in steps:
            self._line("step", asdict(step))

    def epoch(self, epoch: base.Epoch) -> None:
        self._line("epoch", asdict(epoch))

    def end(self, summary: base.Summary | None) -> None:
        self._file.close()

    def _line(self, kind: str, values: dict[str, Any]) -> None:
        plain = {k: _short(v) for k, v in (values | values.pop("details")).items()}
        self._file.write(json.dumps({"kind": kind, **plain}) + "\n")
        self._file.flush()


def _short(value: Any) -> Any:
    """Seven digits are more than the clocks and float32 are good for; JSON has no infinity."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return [_short(v) for v in value] if isinstance(value, list) else value


def _forget_after(folder: RunFolder, step: int) -> None:
    """Drop the lines of steps that a crash threw away: they are computed again."""
    kept = []
    for line in folder.metrics.read_text("utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):  # the crash cut this line short
            continue
    temporary = folder.metrics.with_name(f"{folder.metrics.name}.tmp-{os.getpid()}")
    temporary.write_text("".join(kept), "utf-8")
    os.replace(temporary, folder.metrics)
