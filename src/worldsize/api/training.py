"""Training from Python: the run of the command line, in processes of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from numbers import Integral
from pathlib import Path
from typing import Any

from worldsize import errors
from worldsize.api.following import End, follow
from worldsize.api.run import Run
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.distributed.rank import discover_rank_info
from worldsize.distributed.stop_signals import SIGNALS, temporary_folder
from worldsize.errors import INTERNAL_ERROR, SIGNAL_BASE, SUCCESS, Stopped, UserError, WorldsizeError, as_path, own_errors
from worldsize.launch import entry_point
from worldsize.launch.local import ERROR_VARIABLE, reports
from worldsize.runs import run_folder
from worldsize.runs.run_folder import RunFolder

# The exceptions that an exit code means; 69 and 70 have several causes, which the message tells.
_ERRORS: dict[int, type[WorldsizeError]] = {
    kind.exit_code: kind
    for kind in (
        errors.UserError,
        errors.DataError,
        errors.CheckpointError,
        errors.NoProgress,
        errors.NotSaved,
        errors.Stopped,
        errors.Diverged,
    )
}
# Of a process that a signal ended which asks a run to stop: by its default action, or before there was a step to save.
_BY_REQUEST = {code for number in SIGNALS for code in (-number, SIGNAL_BASE + number)}


@own_errors()
def load_recipe(source: str | os.PathLike[str], changes: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe by its name or from a YAML file, perhaps with changes.

    Args:
        changes: settings by their dotted names, as on the command line: ``{"epochs": 5, "model.name": "resnet18"}``; or
            nested, as in a file: ``{"model": {"name": "resnet18"}}`` leaves the other settings of ``model`` alone.

    Raises:
        UserError: no such recipe, an unknown setting, or an invalid value.
        StoreUnreachable: the file's disk does not answer.
    """
    as_path(source, "source")  # as text, ./digits is a file, not the recipe of that name
    values = recipe_files.load(os.fspath(source)).model_dump(mode="json")
    if not isinstance(changes or {}, Mapping):
        raise UserError(f"changes is {changes!r}: pass settings by their names, such as {{'epochs': 5}}")
    for name, value in (changes or {}).items():
        if not isinstance(name, str):
            raise UserError(f"{source} has no setting {name!r}: names of settings are text")
        *sections, last = name.split(".")
        section = values
        for one in sections:
            section = section.get(one) if isinstance(section, dict) else None  # type: ignore[assignment]
        if not isinstance(section, dict) or last not in section:
            known = list(recipe_files.flat_keys(Recipe))
            raise UserError(f"{source} has no setting {name!r}{errors.did_you_mean(name, known)}")
        section.update(recipe_files.merge(section, {last: value}))
    return recipe_files.validate(values, f"{source} with {', '.join(changes or {}) or 'no changes'}")


@own_errors()
def train(
    recipe: Recipe | str | os.PathLike[str],
    *,
    procs: int = 1,
    name: str | None = None,
    out: str | os.PathLike[str] = "runs",
    quiet: bool = False,
) -> Run:
    """Train as ``worldsize train RECIPE`` does: the same processes, the same numbers, the same run folder.

    The run's output is printed unless it is ``quiet``. Nothing of this process changes: no seed, no number of threads, no
    process group.

    Args:
        recipe: a recipe, the name of one, or a YAML file.
        procs: processes on this machine; each uses one GPU, or its share of the cores.
        name: of the run folder (default: RECIPE-N).
        out: where the run folder is created.

    Raises:
        UserError: what the command line refuses, and any call in a process that a launcher started.
        Stopped: interrupted; everything up to the last step is saved, and `resume` continues. Before the first step, nothing
            is saved, and the message says so.
        WorldsizeError: anything else that ends a run; ``exit_code`` is that of the command.
    """
    count = _count(procs)
    if name is not None and not isinstance(name, str):
        raise UserError(f"name {name!r}: must be text")
    out, stem = as_path(out, "out"), "run" if isinstance(recipe, Recipe) else as_path(recipe, "recipe").stem
    chosen = recipe if isinstance(recipe, Recipe) else recipe_files.load(os.fspath(recipe))
    run_folder.check_name(out, name)
    with temporary_folder() as folder:
        file = folder / f"{stem}.yaml"
        _write(file, chosen)
        # Without a name, the run itself takes the next free one; this process would not know if another run takes it, too.
        words = [str(file), f"--procs={count}", f"--out={out}", *([] if name is None else [f"--name={name}"])]

        def begun() -> Path | None:
            return _begun_with(file, out) if name is None else out / name

        _run(words, folder, quiet, lambda: _events(begun()), "nothing was saved")
        if (path := begun()) is None:
            raise WorldsizeError(f"the run has finished, but no history.jsonl in {out} names its recipe, {file}")
    return Run(path)


@own_errors()
def resume(run: Run | str | os.PathLike[str], *, procs: int = 1, allow_changes: bool = False, quiet: bool = False) -> Run:
    """Continue a run at the exact step where it stopped, as ``worldsize train --resume`` does.

    Args:
        procs: processes on this machine; another number than before gives the same numbers.
        allow_changes: continue although the recipe or the data changed.

    Raises:
        UserError: it is no run, or another process trains it.
        CheckpointError: it has no intact checkpoint.
        WorldsizeError: see `train`.
    """
    count, path = _count(procs), run.path if isinstance(run, Run) else as_path(run, "run")
    with temporary_folder() as folder:
        more = ["--allow-changes"] if allow_changes else []
        words = [f"--resume={path}", f"--procs={count}", *more]
        _run(words, folder, quiet, lambda: _events(path), f"{path} is as it was")
    return Run(path)


def _write(file: Path, recipe: Recipe) -> None:
    """Write the recipe where the command finds it."""
    try:
        file.write_text(recipe_files.to_yaml(recipe), "utf-8")
    except OSError as error:  # names no file if the disk is full
        raise errors.of_system(f"cannot write {file}: {error.strerror}", error) from None


def _count(procs: object) -> str:
    """The number of processes as a word of the command line."""
    if isinstance(procs, bool) or not isinstance(procs, Integral):
        raise UserError(f"procs is {procs!r}: pass a whole number of processes, such as 2")
    return str(procs)


def _begun_with(recipe: Path, out: Path) -> Path | None:
    """The run in ``out`` whose command has this file, in a folder of its own; None if it has not begun."""
    for history in out.glob("*/history.jsonl"):
        with suppress(OSError), history.open(encoding="utf-8", errors="replace") as lines:
            if f"{recipe.parent.name}/" in next(lines, ""):
                return history.parent
    return None


def _events(run: Path | None) -> list[str]:
    """The lines of a run's history; none before it has begun."""
    if run is None:
        return []
    try:
        return RunFolder(run).history.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _run(words: list[str], reported: Path, quiet: bool, events: Callable[[], list[str]], if_unbegun: str) -> None:
    """Run ``worldsize train WORDS``, and raise what ended it.

    Args:
        reported: a folder for its report.
        events: returns the lines of the run's history so far.
        if_unbegun: what to say of the run if it is interrupted before its first step.
    """
    if discover_rank_info().size > 1:
        raise UserError(
            "worldsize.train starts its own processes: under torchrun, mpirun or srun use the command `worldsize train`"
        )
    before = len(events())
    environment = os.environ | {ERROR_VARIABLE: str(reported / "error.json"), "PYTHONUNBUFFERED": "1"}
    end = follow([*entry_point.command(sys.executable), "train", *words], environment, quiet)
    lines = events()
    done, finished = lines[before:], bool(lines) and '"event": "finished"' in lines[-1]
    code = _told(reported, finished) if end.code is None else end.code
    if code == SUCCESS:
        return
    if code in _BY_REQUEST and done and finished:
        return  # its launcher was interrupted after the processes that train had ended
    if not done and code not in _ERRORS and (end.interrupted or code in _BY_REQUEST):
        raise Stopped(f"interrupted before the first step: {if_unbegun}")
    raise _error(code, end, reported)


def _told(reported: Path, finished: bool) -> int:
    """The exit code of a training whose own is lost, from its report, or from its history if it ended without."""
    found = reports(reported)
    return found[0][1].code if found else SUCCESS if finished else INTERNAL_ERROR


def _error(code: int, end: End, reported: Path) -> WorldsizeError:
    """What ended a training that failed."""
    if code < 0:
        error = WorldsizeError(f"the training was killed by {signal.Signals(-code).name}")
        error.exit_code = SIGNAL_BASE - code
        return error
    found = reports(reported)
    message = found[0][1].message if found else _reason(end.said)
    lost = "an exit code that is not known: this program ignores SIGCHLD, or waits for all children"
    known = f"exit code {code}" if end.code is not None else lost
    error = _ERRORS.get(code, WorldsizeError)(message or f"the training ended with {known}")
    error.exit_code = code
    return error


def _reason(lines: Sequence[str]) -> str:
    """The last line; or, if a box ends there, in which the command line is refused, the box's first paragraph."""
    if not lines or not lines[-1].startswith("╰"):
        return lines[-1] if lines else ""
    inside = [line.strip("│ ") for line in lines if line.startswith("│")]
    return " ".join(takewhile(lambda text: text.strip("─"), inside))
