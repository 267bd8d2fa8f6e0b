"""metrics.jsonl: one JSON object per line, ``{"kind": "step" | "epoch", ...}``; numbers as in `track.base`.

The numbers that a fingerprint covers are written without rounding, all others with seven digits. Epochs also have the
``time`` at the end of their evaluation, in seconds since 1970. timing.jsonl has one `track.base.Window` per line.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from worldsize.config.recipe import Track
from worldsize.config.wording import count
from worldsize.runs import atomic
from worldsize.runs.run_folder import RunFolder
from worldsize.runs.step_hashes import COVERED
from worldsize.track import base

log = logging.getLogger(__name__)

_MOST_WAITING = 64 << 20  # characters; the lines of about a hundred thousand steps


class Tracker(base.Tracker):
    def __init__(self, settings: Track, folder: RunFolder, resumed_step: int) -> None:
        for path in (folder.metrics, folder.timing):
            if path.exists():
                kept = _drop(path, lambda record: record["step"] > resumed_step)
                if path == folder.metrics:
                    _warn_of_gap(path, kept, resumed_step)
        self._metrics, self._timing = _Lines(folder.metrics), _Lines(folder.timing)

    def begin(self, facts: base.RunFacts) -> None:
        if facts.evaluates_first:
            _drop(self._metrics.path, lambda record: record.get("kind") == "epoch" and record["step"] == facts.first_step)

    def steps(self, steps: Sequence[base.Step]) -> None:
        self._metrics.add("".join(_line("step", asdict(step)) for step in steps))

    def epoch(self, epoch: base.Epoch) -> None:
        self._metrics.add(_line("epoch", asdict(epoch), time=round(time.time(), 3)))

    def window(self, window: base.Window) -> None:
        self._timing.add(json.dumps(_rounded(asdict(window))) + "\n")

    def end(self, summary: base.Summary | None) -> None:
        for lines in (self._metrics, self._timing):
            lines.add("")
            lines.warn_of_missing()


class _Lines:
    """Appends to a file. While the disk is full, or does not answer, what is new waits in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self._waiting = path, ""
        self._failing = False
        atomic.append(path, "")  # the file exists from now on
        self._size = path.stat().st_size

    def add(self, text: str) -> None:
        self._waiting += text
        try:
            lost = self._lost()
            atomic.append(self.path, self._waiting)
            self._size = self.path.stat().st_size
        except OSError as error:
            if len(self._waiting) > _MOST_WAITING:
                raise
            if not self._failing:
                log.warning("cannot write %s (%s): new lines wait in memory", self.path, error.strerror)
            self._failing = True
            return
        if lost:
            log.warning("%s was deleted or replaced: what was recorded before is lost", self.path)
        elif self._failing:
            log.warning("%s is complete again", self.path)
        self._waiting, self._failing = "", False

    def _lost(self) -> bool:
        """Whether the file has lost lines, or does not exist any more although its folder does."""
        try:
            return self.path.stat().st_size < self._size
        except FileNotFoundError:
            return self._size > 0

    def warn_of_missing(self) -> None:
        if self._waiting:
            log.warning("%s lacks the last %s", self.path, count(self._waiting.count("\n"), "line"))


def _line(kind: str, values: dict[str, Any], **exact: float) -> str:
    present = {k: v for k, v in (values | values.pop("details")).items() if v not in ([], {}, None)}
    plain = {k: _rounded(v, k in COVERED) for k, v in present.items()}
    return json.dumps({"kind": kind, **plain, **exact}) + "\n"


def _rounded(value: Any, exact: bool = False) -> Any:
    """Round to seven digits unless ``exact``; null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return (value if exact else float(f"{value:.7g}")) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def _drop(path: Path, lost: Callable[[dict[str, Any]], bool]) -> list[str]:
    """Drop the lines that are ``lost``: a crash came before a checkpoint had them, so they are computed again.

    Returns:
        The other lines.
    """
    kept = []
    with atomic.naming(path):
        lines = path.read_text("utf-8", errors="replace").splitlines(keepends=True)
    for line in lines:
        try:
            if not lost(json.loads(line)):
                kept.append(line)
        except (ValueError, KeyError):  # line truncated by the crash
            continue
    if len(kept) < len(lines):
        atomic.write_text(path, "".join(kept))
    return kept


def _warn_of_gap(path: Path, lines: Sequence[str], resumed_step: int) -> None:
    """Warn if the last step with a fingerprint is before the resumed one: files of two states of the run were mixed."""
    steps = (record for record in map(json.loads, reversed(lines)) if record.get("kind") == "step")
    last = next(steps, None)
    if last is not None and last.get("chain") and last["step"] < resumed_step:
        log.warning(
            "%s ends at step %s although the run continues after step %s: the steps between are lost, and `worldsize audit` "
            "will find the run inconsistent",
            path,
            f"{last['step']:,}",
            f"{resumed_step:,}",
        )
