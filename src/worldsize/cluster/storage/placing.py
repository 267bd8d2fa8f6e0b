"""Where a received tree goes, and what it may replace there.

A run folder is one state of a run. It is replaced as a whole and never merged with another state: a resumed run would take
the newest checkpoint of one and the metrics of the other. It is not replaced by an earlier state, and never lands inside
another run folder. Other folders are merged.

Like `transfer`, which imports it, this file is sent to the pod: it supports Python 3.9 and imports only the standard
library.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_RECORDS = ("history.jsonl", "metrics.jsonl", "timing.jsonl", "environment.json", "result.json", "starts.json")
# Also one that was moved out of the way of a newer save of its step.
_CHECKPOINT = re.compile(r"step-(\d{8,})(\.tmp-old-.*)?")
_OF_EXPORT = "export.json"  # an export has a recipe.yaml, too
_TAIL = 1 << 20  # bytes; longer than a line of metrics.jsonl

# Of the file ``lock``, see `worldsize.runs.run_lock`.
_SILENCE_S = 30.0
_WATCHED_S = 12.0  # longer than two beats
_POLL_S = 0.5

# The last steps of a run: of its newest ``checkpoint`` and of its ``metrics``; 0 without.
RunState = dict[str, int]


class Failed(Exception):
    """The transfer is impossible or was interrupted. ``user_error``: the user can fix the cause."""

    def __init__(self, message: str, user_error: bool = False) -> None:
        super().__init__(message)
        self.user_error = user_error


def walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name inside the tree, path) for the root, named ".", and everything below it; sorted, parents first."""
    yield ".", root
    for folder, folders, files in os.walk(root, onerror=_ignore_missing):
        folders.sort()
        for name in sorted(folders + files):
            path = Path(folder, name)
            yield path.relative_to(root).as_posix(), path


def is_run(path: Path) -> bool:
    """Whether a training has begun in this folder; the same as `worldsize.runs.resumable.has_begun`, and no export."""
    if not (path / "recipe.yaml").is_file() or (path / _OF_EXPORT).is_file():
        return False
    if any((path / name).is_file() for name in _RECORDS) or _checkpoints(path):
        return True
    # A process that is killed while it builds the network has written these two, and nothing else is in the folder.
    own = (".", "recipe.yaml", "log.", "lock", "checkpoints")
    return (path / "log.txt").is_file() and all(name.startswith(own) for name in os.listdir(path))


def run_state(path: Path) -> RunState | None:
    """How far the run in ``path`` has come; None if it is no run folder."""
    if not is_run(path):
        return None
    return {"checkpoint": max(_checkpoints(path), default=0), "metrics": _last_step(path / "metrics.jsonl")}


def destination(path: Path, name: str, run: RunState | None, as_folder: bool = False) -> Path:
    """Where a file or folder called ``name`` goes if the user names ``path``: inside it if it is a folder.

    A run's own folder means itself.

    Args:
        run: how far the run has come that is copied; None if it is no run folder.
        as_folder: ``path`` is a folder, also if it does not exist.

    Raises:
        Failed: a run would be inside the folder of another one.
    """
    target = path / name if path.is_dir() or as_folder else path
    if run is None:
        return target
    real = path.resolve()
    if real.name == name and is_run(real) and not real.is_mount():
        return path if path.name == name and not path.is_symlink() else real
    parent = target.parent.resolve()
    for around in (parent, *parent.parents):
        if is_run(around):
            raise Failed(
                f"{target} would be a run inside the folder of another run, {around}; name a folder outside it, such as "
                f"{around.parent}, or one that does not exist yet",
                user_error=True,
            )
    return target


def check(target: Path, run: RunState | None, replace: bool) -> None:
    """Refuse, before anything is sent or moved, what must not be replaced.

    Args:
        run: how far the run has come that is copied; None if it is no run folder.
        replace: whether the user allows that files are replaced.

    Raises:
        Failed: ``target`` exists and ``replace`` is missing, or is a run that has steps that the copied run lacks, or that a
            process trains.
    """
    if not os.path.lexists(target):
        return
    old = run_state(target) if run is not None else None
    if run is not None and old is not None and any(old[what] > run[what] for what in old):
        raise Failed(
            f"{target} has steps that the run to copy lacks: {_described(old)}, in the run to copy {_described(run)}. "
            f"Nothing was changed. Copy in the other direction, or to another name; or rename or delete {target} first",
            user_error=True,
        )
    if not replace:
        how = "overwrite it" if old is None else "replace the whole run"
        raise Failed(f"{target} already exists; pass --force to {how}", user_error=True)
    if old is not None and is_trained(target):
        raise Failed(
            f"{target} is being trained, and its process would lose what it saves. Nothing was changed. Stop it, or wait "
            "for its end; or copy to another name",
            user_error=True,
        )


def is_trained(run: Path) -> bool:
    """Whether a process holds the lock of the run, or writes to it where locks do not reach: it trains the run."""
    lock = run / "lock"
    try:
        file = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return True
    finally:
        os.close(file)  # and with it the lock
    try:
        before, last = lock.read_bytes(), lock.stat().st_mtime
        # A run that ended leaves an empty file, a process that was killed an old one, and a copy one that does not change.
        until = time.monotonic() + (_WATCHED_S if before and abs(time.time() - last) < _SILENCE_S else 0.0)
        while time.monotonic() < until:
            time.sleep(_POLL_S)
            if (now := lock.read_bytes()) != before:
                return bool(now)
    except OSError:
        pass
    return False


def move_into_place(new: Path, target: Path, replace: bool) -> None:
    """Move the complete tree ``new`` to ``target``, on the same file system.

    Raises:
        Failed: as `check`, also for each run inside the tree; or a folder would replace a file, or a file a folder.
    """
    check(target, run_state(new), replace)
    moves = []
    complete: set[Path] = set()  # folders that move with all that they contain
    for name, path in walk(new):
        existing = target / name
        if not complete.isdisjoint(path.parents):
            continue
        if not os.path.lexists(existing):
            complete.add(path)
        elif is_folder(path) != is_folder(existing):
            raise Failed(f"{existing}: cannot replace a folder with a file, or a file with a folder", user_error=True)
        elif is_folder(path):
            run = run_state(path)
            if run is None or not is_run(existing):
                continue
            check(existing, run, replace)
            complete.add(path)
        moves.append((path, existing))
    for path, existing in moves:
        if is_folder(existing):
            _exchange(path, existing)
        else:
            path.replace(existing)


def is_folder(path: Path) -> bool:
    """Whether it is a folder, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _exchange(new: Path, target: Path) -> None:
    """Replace the folder as a whole. The old one stays, complete, beside ``new`` until the caller deletes it there.

    A process that is killed between the two renames leaves both complete, without ``target``.
    """
    aside = Path(tempfile.mkdtemp(prefix=".old-", dir=new.parent)) / "old"
    try:
        target.rename(aside)
        new.rename(target)
    except BaseException:  # also a signal's
        if os.path.lexists(aside) and not os.path.lexists(target):
            aside.rename(target)
        raise


def _checkpoints(run: Path) -> list[int]:
    """The steps of the run's checkpoints."""
    try:
        with os.scandir(run / "checkpoints") as entries:
            found = [_CHECKPOINT.fullmatch(entry.name) for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(match[1]) for match in found if match]


def _last_step(metrics: Path) -> int:
    """The step of the last complete line."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):  # cut by a crash
            continue
    return 0


def _described(run: RunState) -> str:
    checkpoint = f"the newest checkpoint is of step {run['checkpoint']:,}" if run["checkpoint"] else "there is no checkpoint"
    return f"{checkpoint} and metrics.jsonl ends at step {run['metrics']:,}"


def _ignore_missing(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error
