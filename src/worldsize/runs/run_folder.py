"""The run folder: all files of a run, readable without this program.

``runs/NAME/`` contains ``recipe.yaml`` (resolved, a valid input), ``environment.json``, ``metrics.jsonl`` and
``timing.jsonl`` (one object per line), ``history.jsonl``, ``log.txt``, ``checkpoints/`` and, at the end, ``result.json``.
``lock`` names the process that trains the run; see `worldsize.runs.run_lock`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from worldsize.config import job_pod
from worldsize.config.wording import printable_lines, quoted
from worldsize.errors import NoProgress, UserError, WorldsizeError, explained, refuse_closed
from worldsize.launch.failed_workers import LAST_FAILURE
from worldsize.runs import atomic
from worldsize.runs.atomic import write_json

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RECIPES = (".yaml", ".yml")
# File systems take 255 bytes. The rest is for what is added to a name, such as -seed12.
_LONGEST_NAME = 200
# The name of a checkpoint: its step.
CHECKPOINT_NAME = re.compile(r"step-\d{8,}")
REPLACED = ".tmp-old-"  # in the name of a checkpoint that moves out of the way of a newer save of the same step


class RunFolder:
    """Paths of one run. Creating the object does not access the file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.timing = path / "timing.jsonl"
        self.history = path / "history.jsonl"
        self.checkpoints = path / "checkpoints"
        self.result = path / "result.json"
        self.starts = path / "starts.json"
        self.lock = path / "lock"

    @property
    def name(self) -> str:
        return self.path.name

    def log_file(self, rank: int) -> Path:
        """This rank's log file; only rank 0's file always exists."""
        return self.path / ("log.txt" if rank == 0 else f"log.rank{rank}.txt")

    def flush(self) -> None:
        """Make what is recorded so far durable, so that it survives a loss of power. Raises OSError."""
        for path in (self.recipe, self.environment, self.metrics, self.timing, self.history):
            with suppress(FileNotFoundError):
                atomic.flush(path)
        atomic.flush(self.path)

    def contents(self) -> list[tuple[str, str]]:
        """(name, description) of each existing file, for display; without timing.jsonl if a run recorded no times."""
        entries = [
            (self.checkpoints, "checkpoints/", "the newest and the best checkpoints, each verified against its manifest"),
            (self.metrics, "metrics.jsonl", "metrics of every step and every evaluation"),
            (self.timing, "timing.jsonl", "where the time of the steps went; see `worldsize explain`"),
            (self.history, "history.jsonl", "starts, checkpoints, stops, and on which machines"),
            (self.recipe, "recipe.yaml", "all settings; a valid input for `worldsize train`"),
            (self.environment, "environment.json", "machine, versions, dataset"),
            (self.result, "result.json", "final metrics"),
            (self.log_file(0), "log.txt", "warnings and decisions"),
        ]
        timed = self.timing.exists() and self.timing.stat().st_size > 0
        kept = [entry for entry in entries if entry[0] != self.timing or timed]
        return [(name, description) for path, name, description in kept if path.exists()]


def create(out: Path, name: str | None, stem: str) -> RunFolder:
    """A new folder ``out/name``; without a name, the next free ``stem-N``, with '-' for characters that a name cannot have.

    Raises:
        UserError: the name exists or is not a valid folder name, or ``out`` cannot be written.
    """
    check_name(out, name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if name is not None:
            (out / name).mkdir()
            return RunFolder(out / name)
        stem = _valid(stem)
        number = _free_number(out, stem)
        while True:
            try:
                (out / f"{stem}-{number}").mkdir()
                return RunFolder(out / f"{stem}-{number}")
            except FileExistsError:  # another run has just created it
                number += 1
    except FileExistsError:
        raise UserError(f"{out if not out.is_dir() else out / (name or stem)} already exists: choose another name") from None
    except OSError as error:
        raise _unwritable(out, f": {error.strerror}") from None


@contextmanager
def removed_if_unwritten(folder: RunFolder) -> Iterator[None]:
    """Around writing the first files of a new run, which on a full disk could not resume, but would keep its name."""
    try:
        yield
    except OSError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _valid(stem: str) -> str:
    """The stem with '-' for what a name cannot have, so that a recipe's file can have any name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[: _LONGEST_NAME - 20] or "run"


def _free_number(out: Path, stem: str) -> int:
    return 1 + max((_number(path.name, stem) for path in out.iterdir()), default=0)


def name_problem(text: str) -> str:
    """Why a run cannot have this name; empty: it can."""
    if _NAME.fullmatch(text) is None:
        return f"{text!r} is not a folder name: use letters, digits, '.', '_' and '-'"
    if len(text) > _LONGEST_NAME:
        return f"{text[:20]}... has {len(text)} characters: use at most {_LONGEST_NAME}"
    return ""


def check_name(out: Path, name: str | None, may_exist: bool = False) -> None:
    """Raise UserError, before any work, if the name exists or is invalid, or if ``out`` cannot be written."""
    if name is not None and (problem := name_problem(name)):
        raise UserError(f"--name {problem}")
    if name is not None and not may_exist and (out / name).exists():
        raise UserError(
            f"run {name!r} already exists in {out}: choose another --name, or resume it with --resume {quoted(out / name)}"
        )
    parent = next((p for p in (out, *out.absolute().parents) if p.exists()), Path("/"))
    if not parent.is_dir():
        raise UserError(f"--out {out}: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable(parent)


def _unwritable(folder: Path, reason: str = "") -> UserError:
    """The error for a folder without permission to write; in a pod, nobody chose it with --out."""
    path = PurePosixPath(folder.absolute())
    if job_pod.inside() and job_pod.VOLUMES in path.parents:
        volume = path.relative_to(job_pod.VOLUMES).parts[0]
        return UserError(
            f"user {os.getuid()} with group {os.getgid()} cannot write to volume {volume} ({folder}){reason}: let its "
            "owner or administrator change the permissions of that folder, or choose another --volume"
        )
    return UserError(f"cannot write to {folder}{reason}; choose another folder with --out")


_OF_EXPORT = "export.json"
_OF_CHECKPOINT = ("manifest.json", "state.json")


def not_a_run(path: Path) -> str | None:
    """What a folder with a recipe.yaml is instead of a run, and what to pass; None: it is a run."""
    if (path / _OF_EXPORT).is_file():
        return "is an export, not a run: pass the run, or to --model.weights a file of the export"
    if all((path / name).is_file() for name in _OF_CHECKPOINT):
        return f"is a checkpoint, not a run: pass the run, {Path(os.path.normpath(path.absolute())).parent.parent}"
    return None


def open_existing(path: Path) -> RunFolder:
    """The existing run in ``path``.

    Raises:
        UserError: ``path`` is not a run folder.
        OSError: it cannot be entered.
    """
    refuse_closed(path)
    folder = RunFolder(path)
    if path.is_file():
        remedy = f". To start a run with this recipe: worldsize train {quoted(path)}" if path.suffix in _RECIPES else ""
        raise UserError(f"{path} is a file, not the folder of a run{remedy}")
    if not path.is_dir():
        raise UserError(f"run {path} does not exist")
    if not folder.recipe.is_file():
        raise UserError(f"{path} is not a run folder: it has no recipe.yaml")
    if (other := not_a_run(path)) is not None:
        raise UserError(f"{path} {other}")
    return folder


def is_gone(folder: RunFolder, taken_over: Callable[[], bool]) -> bool:
    """Whether the folder of a run that trains was deleted or moved away, or another process trains a run in its place.

    A disk that does not answer says nothing about that.
    """
    try:
        folder.recipe.stat()
        return taken_over()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def checkpoint_folders(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, unchecked and unsorted; empty if there is no such folder.

    One that was moved out of the way of a newer save of its step counts if that save did not take its place: the process
    was killed between the two.

    Raises:
        OSError: the folder cannot be listed, or what is in it.
    """
    try:
        with os.scandir(folder) as entries:
            names = {entry.name for entry in entries if entry.is_dir()}
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for name in names:
        step, replaced, _ = name.partition(REPLACED)
        if CHECKPOINT_NAME.fullmatch(step) and not (replaced and step in names):
            found.append(folder / name)
    return found


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved, from its name."""
    return int(checkpoint.name.removeprefix("step-").partition(".")[0])


def count_start(folder: RunFolder, step: int, retries: int) -> None:
    """Record that the run starts from this step.

    Raises:
        NoProgress: it has already started from this step more than ``retries`` times.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(folder.starts.read_text())
        if saved["step"] == step:
            if (starts := int(saved["starts"])) > retries:
                raise NoProgress(
                    f"{folder.path} was started {starts} times from step {step:,} without reaching its next checkpoint; "
                    f"check {folder.log_file(0)}, fix the cause, and allow one more start with --retries {starts}"
                    f"{_last_failure()}"
                )
            write_json(folder.starts, {"step": step, "starts": starts + 1})
            return
    write_json(folder.starts, {"step": step, "starts": 1})


def _last_failure() -> str:
    """How the last start ended, where the agent of this machine knows it: no log has the end of a killed process."""
    failure = os.environ.get(LAST_FAILURE)
    return f". The last time, {failure}" if failure else ""


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))  # a log is read in a terminal


class _LogFile(logging.FileHandler):
    """Ignores a full disk: code that needs the disk reports it, and a lost log line is not worth a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the first record opens the file
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class RunLog:
    """Context manager that logs this process to the run folder, if this machine has the folder.

    An exception that ends the block is the last entry: the message of a `WorldsizeError`, otherwise the traceback.

    Raises:
        OSError: rank 0's file cannot be opened.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._handler: logging.Handler | None = None
        if folder.path.is_dir():
            self._handler = _LogFile(folder.log_file(rank), delay=rank != 0, encoding="utf-8", errors="backslashreplace")
            self._handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def __enter__(self) -> None:
        if self._handler is not None:
            logging.getLogger("worldsize").addHandler(self._handler)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, WorldsizeError):
            error = explained(error) or error
        if isinstance(error, WorldsizeError):
            log.info("%s", error)
        elif isinstance(error, Exception):
            log.info("internal error", exc_info=error)
        if self._handler is not None:
            logging.getLogger("worldsize").removeHandler(self._handler)
            with suppress(OSError):  # close() flushes again what could not be written
                self._handler.close()


def _number(name: str, stem: str) -> int:
    match = re.fullmatch(re.escape(stem) + r"-(\d+)", name)
    return int(match[1]) if match else 0
