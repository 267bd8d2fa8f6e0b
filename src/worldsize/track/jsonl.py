"""metrics.jsonl: one JSON object per line, ``{"kind": "step" | "epoch", ...}``; numbers as in `track.base`.

The numbers that a fingerprint covers are written without rounding, all others with seven digits. Epochs also have the
``time`` at the end of their evaluation, in seconds since 1970. timing.jsonl has one `track.base.Window` per line.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from worldsize.config.recipe import Track
from worldsize.runs.atomic import write_text
from worldsize.runs.run_folder import RunFolder
from worldsize.runs.step_hashes import COVERED
from worldsize.track import base


class Tracker(base.Tracker):
    def __init__(self, settings: Track, folder: RunFolder, resumed_step: int) -> None:
        for path in (folder.metrics, folder.timing):
            if path.exists():
                _drop_after(path, resumed_step)
        self._file = open(folder.metrics, "a", encoding="utf-8")
        self._timing = open(folder.timing, "a", encoding="utf-8")

    def steps(self, steps: Sequence[base.Step]) -> None:
        for step in steps:
            self._line("step", asdict(step))

    def epoch(self, epoch: base.Epoch) -> None:
        self._line("epoch", asdict(epoch), time=round(time.time(), 3))

    def window(self, window: base.Window) -> None:
        self._timing.write(json.dumps(_rounded(asdict(window))) + "\n")
        self._timing.flush()

    def end(self, summary: base.Summary | None) -> None:
        self._file.close()
        self._timing.close()

    def _line(self, kind: str, values: dict[str, Any], **exact: float) -> None:
        present = {k: v for k, v in (values | values.pop("details")).items() if v not in ([], {}, None)}
        plain = {k: _rounded(v, k in COVERED) for k, v in present.items()}
        self._file.write(json.dumps({"kind": kind, **plain, **exact}) + "\n")
        self._file.flush()


def _rounded(value: Any, exact: bool = False) -> Any:
    """Round to seven digits unless ``exact``; null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return (value if exact else float(f"{value:.7g}")) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def _drop_after(path: Path, step: int) -> None:
    """Drop the lines of steps after ``step``: they were lost in a crash and are computed again."""
    kept = []
    for line in path.read_text("utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):  # line truncated by the crash
            continue
    write_text(path, "".join(kept))
