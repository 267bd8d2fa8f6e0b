"""Which checkpoints of a run to keep."""

from __future__ import annotations

import shutil
from pathlib import Path

from worldsize import checkpoint
from worldsize.config.recipe import Checkpoint as Retention


def prune(folder: Path, step: int, settings: Retention) -> None:
    """Delete the checkpoints that the settings do not keep, and all after ``step``, the run's current position.

    Those after it are damaged ones that were skipped when the run resumed.

    Raises:
        OSError: the folder cannot be listed.
    """
    everything = checkpoint.list_checkpoints(folder)
    checkpoints = [path for path in everything if checkpoint.step_of(path) <= step]
    scored = [(score, path) for path in reversed(checkpoints) if (score := checkpoint.score_of(path)) is not None]
    kept = set(checkpoints[: settings.keep])
    if settings.best and scored:
        kept.add(max(scored, key=lambda pair: pair[0])[1])
    if settings.history != "none":
        older = checkpoints if settings.history == "all" else thinned(checkpoints, step)
        kept |= set(older)
    for path in set(everything) - kept:
        shutil.rmtree(path, ignore_errors=True)


def thinned(checkpoints: list[Path], step: int) -> list[Path]:
    """The oldest and the newest checkpoint of each age from 2**k to 2**(k+1) - 1 steps before ``step``.

    The distance between two of them is at most twice the age of the newer one, if checkpoints are saved regularly.
    """
    by_age = sorted(checkpoints, key=checkpoint.step_of)
    newest = {(step - checkpoint.step_of(path)).bit_length(): path for path in by_age}
    oldest = {(step - checkpoint.step_of(path)).bit_length(): path for path in reversed(by_age)}
    return list({*newest.values(), *oldest.values()})


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files of processes that died while writing.

    A checkpoint that such a process has moved out of the way of a newer save, which did not take its place, moves back.
    """
    for path in checkpoint.list_checkpoints(folder):
        if path.suffix and not (final := path.with_suffix("")).exists():
            path.rename(final)
    for path in folder.glob("step-*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".shared-*"):
        path.unlink(missing_ok=True)
