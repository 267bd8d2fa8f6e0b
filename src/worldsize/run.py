"""The run folder: everything a run leaves behind, readable without this program.

``runs/NAME/`` holds ``recipe.yaml`` (resolved, a valid input), ``environment.json``, ``metrics.jsonl`` (one object
a line), ``log.txt``, ``checkpoints/`` and, at the end, ``result.json``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from worldsize.errors import NoProgress, UserError, WorldsizeError

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class RunFolder:
    """Paths of one run. Creating the object touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.result = path / "result.json"
        self.starts = path / "starts.json"

    @property
    def name(self) -> str:
        return self.path.name

    def log_file(self, rank: int) -> Path:
        """Where this rank logs; only rank 0's file is always there."""
        return self.path / ("log.txt" if rank == 0 else f"log.rank{rank}.txt")

    def contents(self) -> list[tuple[str, str]]:
        """(name, what it is) of what is in the folder, for people."""
        told = [
            (self.checkpoints, "checkpoints/", "the newest and the best, each verified by its manifest"),
            (self.metrics, "metrics.jsonl", "every step and every evaluation"),
            (self.recipe, "recipe.yaml", "all settings; `worldsize train` takes it as it is"),
            (self.environment, "environment.json", "machine, versions, data"),
            (self.result, "result.json", "what came out"),
            (self.log_file(0), "log.txt", "warnings and decisions"),
        ]
        return [(name, what) for path, name, what in told if path.exists()]


def create(out: Path, name: str | None, stem: str) -> RunFolder:
    """A new folder ``out/name``; without a name, the next free ``stem-N``.

    Raises:
        UserError: the name is taken or not a file name, or ``out`` cannot be written.
    """
    check_name(out, name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if name is not None:
            (out / name).mkdir()
            return RunFolder(out / name)
        number = 1 + max((_number(path.name, stem) for path in out.iterdir()), default=0)
        while True:
            try:
                (out / f"{stem}-{number}").mkdir()
                return RunFolder(out / f"{stem}-{number}")
            except FileExistsError:  # another run took it in this moment
                number += 1
    except FileExistsError:
        raise UserError(f"{out if not out.is_dir() else out / (name or stem)} exists already: choose another name") from None
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None


def check_name(out: Path, name: str | None, may_exist: bool = False) -> None:
    """Refuse, before any work, a name that is taken or no file name, or an ``out`` that cannot be written."""
    if name is not None and not _NAME.fullmatch(name):
        raise UserError(f"--name {name!r} is not a folder name: use letters, digits, '.', '_' and '-'")
    if name is not None and not may_exist and (out / name).exists():
        raise UserError(
            f"a run called {name!r} exists already in {out}: choose another --name, or go on with --resume {out / name}"
        )
    parent = next((p for p in (out, *out.absolute().parents) if p.exists()), Path("/"))
    if not parent.is_dir():
        raise UserError(f"--out {out}: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {parent}: choose another folder with --out")


def open_existing(path: Path) -> RunFolder:
    """The run in ``path``.

    Raises:
        UserError: there is none.
    """
    folder = RunFolder(path)
    if not path.is_dir():
        raise UserError(f"there is no run {path}")
    if not folder.recipe.is_file():
        raise UserError(f"{path} is not a run folder: it has no recipe.yaml")
    return folder


def count_start(folder: RunFolder, step: int, retries: int) -> None:
    """Remember that the run is started from this step; refuse where that happened ``retries`` times before.

    Raises:
        NoProgress: the same step once more.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(folder.starts.read_text())
        if told["step"] == step:
            write_json(folder.starts, {"step": step, "starts": told["starts"] + 1})
            if told["starts"] > retries:
                raise NoProgress(
                    f"{folder.path} was started {told['starts']} times from step {step:,} and never reached its next "
                    f"checkpoint; {folder.log_file(0)} may say why. Mend that, and allow more starts with --retries"
                )
            return
    write_json(folder.starts, {"step": step, "starts": 1})


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_text` does."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write so that a reader sees the old file or the new one, whatever happens in between."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


class _LogFile(logging.FileHandler):
    """A disk that is full is told by what needs it; a log line is not worth a traceback on the terminal, or an error."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # opening the file, which its first line may do
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class RunLog:
    """This process's log in the run folder, where this machine has it, while a ``with`` block runs.

    What ends the block early is its last entry: the message of a `WorldsizeError`, the traceback of a defect.

    Raises:
        OSError: rank 0's file cannot be opened.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._handler: logging.Handler | None = None
        if folder.path.is_dir():
            self._handler = _LogFile(folder.log_file(rank), delay=rank != 0)
            self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def __enter__(self) -> None:
        if self._handler is not None:
            logging.getLogger("worldsize").addHandler(self._handler)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, WorldsizeError):
            log.info("%s", error)
        elif isinstance(error, Exception):
            log.info("a defect", exc_info=error)
        if self._handler is not None:
            logging.getLogger("worldsize").removeHandler(self._handler)
            with suppress(OSError):  # what could not be written is flushed again
                self._handler.close()


def _number(name: str, stem: str) -> int:
    match = re.fullmatch(re.escape(stem) + r"-(\d+)", name)
    return int(match[1]) if match else 0
