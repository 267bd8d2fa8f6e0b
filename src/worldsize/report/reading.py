"""Reads folders of runs and benchmarks as far as they are complete. Never writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worldsize.attribution import evidence
from worldsize.attribution.evidence import Evidence
from worldsize.config import recipe_files
from worldsize.errors import UserError
from worldsize.runs import atomic
from worldsize.runs.run_folder import RunFolder, checkpoint_folders, open_existing, step_of

Record = dict[str, Any]
_STOPPED = re.compile(r"^(\S+ \S+?)(?:,\d+)? \w+ \S+: (stopped .*step [\d,]+.*)$")
_FAILED = re.compile(r"^\S+ \S+ INFO worldsize\.runs\.run_folder: (.*?)\.?$")
_RANGES = ("images_per_s", "efficiency", "step_s", "duration_s")  # of a forecast
# A stop or an error is logged right after the last metrics; a copied folder has about the same times for all files.
_RESUMED = 10.0  # seconds


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: a stop, an error, or a checkpoint that is on disk. ``time`` is in seconds since
    1970, or None if only the text of ``log.txt`` has it."""

    time: float | None
    text: str


@dataclass(frozen=True)
class Run:
    """A run folder.

    Records of ``steps`` and ``epochs`` are those of metrics.jsonl, see `worldsize.track.base`; numbers that were not finite
    are None. ``damaged`` counts the lines that could not be read. ``modified`` is when a metric was last written and
    ``logged`` when the log was, seconds since 1970; None without the file. ``result`` is None if the run has not finished.
    ``history`` are the lines of history.jsonl, see `runs.history`; ``evidence`` is about the time of its steps. Older
    runs have neither. ``label`` is the name on a page that has another run of the same name, see `told_apart`.
    """

    path: Path
    recipe: Record
    environment: Record
    steps: list[Record]
    epochs: list[Record]
    result: Record | None
    damaged: int
    modified: float | None
    log: str
    logged: float | None
    checkpoints: list[Event]
    history: list[Record] = field(default_factory=list)
    evidence: Evidence | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        return self.label or self.path.resolve().name

    @property
    def dataset(self) -> str:
        """The dataset by name and content of its training images, as text."""
        return f"{self.recipe['data']['name']} {self._digests.get('train', '')}".strip()

    @property
    def validation(self) -> str | None:
        """The content of the validation images; None if the run did not record it."""
        return self._digests.get("val")

    @property
    def _digests(self) -> Record:
        found = self.environment.get("data")
        return found if isinstance(found, dict) else {}

    @property
    def last_entry(self) -> str | None:
        """The last line of the log that starts with a time; None if the run has written metrics since, so was resumed."""
        entries = [line for line in self.log.splitlines() if line[:1].isdigit()]
        resumed = (self.modified or 0.0) - (self.logged or 0.0) > _RESUMED
        return entries[-1] if entries and not resumed else None

    @property
    def stopped(self) -> str | None:
        """The message of the stop that ended the run, if one did."""
        found = _STOPPED.match(self.last_entry or "")
        return found[2] if found else None

    @property
    def failure(self) -> str | None:
        """The first line of the message of the error that ended the run, if one did; of a traceback, also its last."""
        # `run_folder.RunLog` writes the message of an error as the last entry, on level INFO; warnings do not end a run.
        found = _FAILED.match(self.last_entry or "") if self.stopped is None and self.result is None else None
        if found and found[1] == "internal error":
            return f"{found[1]}: {self.log.strip().splitlines()[-1]}"
        return found[1] if found else None

    @property
    def events(self) -> list[Event]:
        """What the history has, in order; without one, the stops in the log and the checkpoints on disk."""
        if self.history:
            return [Event(line["time"], _told(line)) for line in self.history]
        stops = [_STOPPED.match(line) for line in self.log.splitlines()]
        return [Event(None, f"{found[1]}: {found[2]}") for found in stops if found] + self.checkpoints


@dataclass(frozen=True)
class Bench:
    """The folder of a benchmark: ``facts`` from bench.json (empty without one), ``results`` one record per measurement.

    Runs that ``failed`` have a record with the reason. ``steps`` has what the runs of ``results`` recorded of their steps,
    by the index of the result; empty if the runs were not kept.
    """

    path: Path
    facts: Record
    results: list[Record]
    damaged: int
    failed: list[Record] = field(default_factory=list)
    steps: dict[int, list[Record]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def kind(self) -> str:
        """``scaling``: over world sizes; ``network``: of messages; ``speed``: of anything else, in images/s."""
        first = self.results[0]
        return "scaling" if "world_size" in first else "network" if "bus_gb_per_s" in first else "speed"


@dataclass(frozen=True)
class Plan:
    """What `worldsize plan` predicted: ``facts`` is everything, ``forecasts`` has one record per number of devices."""

    path: Path
    facts: Record
    forecasts: list[Record]

    @property
    def name(self) -> str:
        return self.path.name


def is_bench(path: Path) -> bool:
    """Whether the folder is that of a benchmark."""
    return (path / "results.jsonl").is_file()


def read(path: Path) -> Run:
    """The run in ``path``. Lines that a crash truncated are counted, not fatal.

    Raises:
        UserError: not a run folder, or its recipe is damaged.
        OSError: a file that is there cannot be read.
    """
    folder = open_existing(path)
    try:
        with atomic.naming(folder.recipe):
            recipe = recipe_files.parse(folder.recipe.read_text("utf-8"), str(folder.recipe))
        recipe["data"]["name"]
    except (ValueError, UserError, TypeError, KeyError):
        raise UserError(f"{folder.recipe} is not the recipe of a run") from None
    records, damaged = parse(_text(folder.metrics))
    return Run(
        path=path,
        recipe=recipe,
        environment=_environment(folder),
        steps=[r for r in records if r.get("kind") == "step" and "step" in r],
        epochs=[r for r in records if r.get("kind") == "epoch" and "step" in r],
        result=_json(folder.result),
        damaged=damaged,
        modified=_modified(folder.metrics),
        log=_text(folder.log_file(0)),
        logged=_modified(folder.log_file(0)),
        checkpoints=list(_checkpoints(folder)),
        history=_history(folder),
        evidence=_evidence(folder),
    )


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs; those with the name of another are labeled with as much of their paths as tells them apart."""
    paths = [run.path.resolve().parts for run in runs]
    found = []
    for run, own in zip(runs, paths, strict=True):
        others = [other for other in paths if other != own]
        length = next(n for n in range(1, len(own) + 1) if all(other[-n:] != own[-n:] for other in others))
        found.append(replace(run, label="/".join(own[-length:])) if length > 1 else run)
    return found


def read_bench(path: Path) -> Bench:
    """The benchmark in ``path``.

    Raises:
        UserError: it has no complete measurement of a speed.
    """
    every, damaged = parse(_text(path / "results.jsonl"))
    for measure in ("images_per_s", "bus_gb_per_s"):
        if results := [r for r in every if isinstance(r.get(measure), (int, float))]:
            failed = [r for r in every if "failed" in r]
            return Bench(path, _json(path / "bench.json") or {}, results, damaged, failed, _steps(path, results))
    raise UserError(f"{path / 'results.jsonl'} has no measurement of a speed")


def _steps(path: Path, results: list[Record]) -> dict[int, list[Record]]:
    found = {}
    for index, result in enumerate(results):
        # A folder next to the file, whatever results.jsonl says.
        records, _ = parse(_text(path / Path(str(result.get("run"))).name / "metrics.jsonl"))
        if steps := [r for r in records if r.get("kind") == "step" and isinstance(r.get("images_per_s"), (int, float))]:
            found[index] = steps
    return found


def read_plan(path: Path) -> Plan:
    """The predictions in a file of ``worldsize plan --json``.

    Raises:
        UserError: it is something else.
    """
    content = _json(path) or {}
    forecasts = content.get("forecasts")
    if not str(content.get("format")).startswith("worldsize plan ") or not forecasts:
        raise UserError(f"{path} is not a plan: write one with worldsize plan RECIPE --devices 8,16 --json {path.name}")
    if not (isinstance(forecasts, list) and all(map(_is_forecast, forecasts))):
        raise UserError(f"{path} is damaged: a prediction in it is incomplete; write it again with worldsize plan --json")
    return Plan(path, content, forecasts)


def _is_forecast(record: Any) -> bool:
    """Whether it has what charts and tables of plans show."""
    try:
        for one in (record[name] for name in _RANGES):
            float(one["value"]), float(one["low"]), float(one["high"])
        return record["devices"] > 0 and isinstance(record["bottleneck"], str)
    except (KeyError, TypeError, ValueError):
        return False


def parse(text: str) -> tuple[list[Record], int]:
    """The JSON objects of ``text``, one per line, and the number of lines that are not complete objects."""
    found, damaged = [], 0
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif line.strip():
            damaged += 1
    return found, damaged


def _environment(folder: RunFolder) -> Record:
    """environment.json, without a number of processes that is none; empty if it is missing or damaged."""
    found = _json(folder.environment) or {}
    return found if isinstance(found.get("world_size", 1), int) else {k: v for k, v in found.items() if k != "world_size"}


def _history(folder: RunFolder) -> list[Record]:
    lines, _ = parse(_text(folder.history))
    return [line for line in lines if {"time", "event", "step"} <= line.keys()]


def _told(line: Record) -> str:
    """A line of the history in words."""
    event, step = line["event"], f"step {line['step']:,}"
    if event == "started":
        hosts = ", ".join(line.get("hosts", {})) + (" and others" if line.get("more_hosts") else "")
        ranks = line.get("world_size", 1)
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        return f"started after {step}, {processes} on {hosts}: {line.get('command') or 'unknown command'}"
    reason = str(line.get("reason", "")).partition(";")[0]
    return {"saved": f"checkpoint after {step}", "finished": f"finished after {step}"}.get(event, reason or event)


def _evidence(folder: RunFolder) -> Evidence | None:
    try:
        return evidence.read(folder)
    except UserError:
        return None


def _checkpoints(folder: RunFolder) -> Iterator[Event]:
    for path in sorted(checkpoint_folders(folder.checkpoints), key=step_of):
        manifest = path / "manifest.json"
        if manifest.is_file():
            yield Event(manifest.stat().st_mtime, f"checkpoint after step {step_of(path):,}")


def _modified(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _text(path: Path) -> str:
    """The content of a text file; empty without such a file."""
    try:
        with atomic.naming(path):
            return path.read_text("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def _json(path: Path) -> Record | None:
    records, _ = parse(_text(path).replace("\n", " "))
    return records[0] if records else None
