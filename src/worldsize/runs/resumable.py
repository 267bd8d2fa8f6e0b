"""Whether a folder is a run that can continue, judged by its files before anything starts or changes."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path

from worldsize.config import job_pod
from worldsize.config.wording import count
from worldsize.errors import CheckpointError, UserError
from worldsize.runs.run_folder import CHECKPOINT_NAME, RunFolder, checkpoint_folders, open_existing, step_of


def opened(path: Path) -> RunFolder:
    """The run in ``path``, for ``--resume``.

    Raises:
        UserError: it is a checkpoint, a part of a run, or a folder that only holds a recipe. A new run would start there. Or
            a link in it leads elsewhere.
    """
    if is_checkpoint(path):
        raise UserError(_names_a_checkpoint(path))
    real = path.absolute()
    around = next((parent for parent in list(real.parents)[:2] if has_begun(RunFolder(parent))), None)
    if path.exists() and around is not None and not has_begun(RunFolder(path)):
        raise UserError(f"{path} is not a run folder but a part of one: {_command(around)}")
    folder = open_existing(path)
    if not has_begun(folder):
        raise UserError(
            f"{path} is not a run folder: it has a recipe.yaml, but no training has written metrics or checkpoints there. "
            f"To train this recipe in a new folder: worldsize train {shlex.quote(str(folder.recipe))}"
        )
    _refuse_links(folder)
    return folder


def check(folder: RunFolder) -> None:
    """Refuse a run that has saved its state and has no checkpoint any more. It would start again and replace its results.

    Raises:
        CheckpointError: names the last step that is known, and the remedy.
    """
    if newest(folder) is not None:
        return
    if (step := _saved(folder)) is not None:
        again = f"worldsize train {shlex.quote(str(folder.recipe))}"
        new = f"{job_pod.AGAIN} with another --name" if job_pod.inside() else again
        raise CheckpointError(
            f"{folder.path} has recorded {count(step, 'step')}, but {folder.checkpoints} holds no checkpoint. "
            f"Nothing was changed. Restore that folder, or mount the storage that it is on; or start a new run: {new}"
        )


def check_started(folder: RunFolder) -> None:
    """Refuse a folder that ``--autoresume`` would continue, although no run has begun or was about to begin there.

    Raises:
        UserError: names a file that no run writes before it begins, or a link that leads elsewhere.
        CheckpointError: as `check`.
    """
    if not has_begun(folder) and (foreign := _foreign(folder.path)):
        raise UserError(f"{folder.path} exists and is not a run folder: it has {foreign[0]}; choose another --name")
    _refuse_links(folder)
    check(folder)


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a checkpoint, or what is left of one."""
    named = CHECKPOINT_NAME.fullmatch(path.absolute().resolve().name.partition(".tmp-")[0]) is not None
    return path.is_dir() and (named or ((path / "manifest.json").is_file() and (path / "state.json").is_file()))


def has_begun(folder: RunFolder) -> bool:
    """Whether a training has begun in this folder."""
    if not folder.recipe.is_file():
        return False
    records = (folder.history, folder.metrics, folder.timing, folder.environment, folder.result, folder.starts)
    if any(path.is_file() for path in records) or newest(folder) is not None:
        return True
    # A process that is killed while it builds the network has written these two, and nothing else is in the folder.
    return folder.log_file(0).is_file() and not _foreign(folder.path)


def newest(folder: RunFolder) -> str | None:
    """The name of the newest checkpoint; None without one."""
    found = [(step_of(path), path.name) for path in checkpoint_folders(folder.checkpoints)]
    return max(found)[1] if found else None


def _refuse_links(folder: RunFolder) -> None:
    """Refuse a run with a link that leads out of its folder: in a run of others, training would write to any file.

    The folder of the checkpoints may be on another disk: training only adds and removes checkpoints there.
    """
    inside = {folder.path.resolve(), folder.checkpoints.resolve()}
    for path in folder.path.iterdir() if folder.path.is_dir() else ():
        if path.is_symlink() and path != folder.checkpoints and inside.isdisjoint(path.resolve().parents):
            raise UserError(
                f"{path} is a link to {path.readlink()}, where training would write. Is the run from somebody else? If it "
                "is yours, put the file itself in its place"
            )


def _foreign(path: Path) -> list[str]:
    """What no run writes before its first record, sorted. Hidden files belong to file systems."""
    names = (entry.name for entry in path.iterdir()) if path.is_dir() else ()
    return sorted(name for name in names if not name.startswith((".", "recipe.yaml", "log.", "lock", "checkpoints")))


def _saved(folder: RunFolder) -> int | None:
    """The last step that is known of a run that has saved its state; None if it was killed before its first checkpoint."""
    if not folder.history.is_file():  # an older version, or the file was deleted: every step that it did was perhaps saved
        return max(_steps(folder.metrics, "kind", ("step", "epoch")), default=0 if folder.result.is_file() else None)
    events = ("saved", "stopped", "finished")
    saved = [*_steps(folder.history, "event", events), *filter(None, _steps(folder.history, "event", ("started",)))]
    return max([*saved, *_steps(folder.metrics, "kind", ("step",))]) if saved or folder.result.is_file() else None


def _steps(path: Path, key: str, values: tuple[str, ...]) -> list[int]:
    """The ``step`` of all lines whose ``key`` has one of the values; a line that a crash has cut is skipped."""
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            if record[key] in values:
                found.append(int(record["step"]))
    return found


def _names_a_checkpoint(path: Path) -> str:
    real = path.absolute().resolve()
    message = f"{path} is a checkpoint: --resume names a run and continues it from its newest checkpoint"
    if real.parent.name == "checkpoints" and RunFolder(real.parents[1]).recipe.is_file():
        # As the user wrote it, if that is possible.
        written = path.parents[1] if path.name == real.name and len(path.parents) > 2 else real.parents[1]
        message += f". {_command(written)}. To go back to an earlier one, first move the later ones out of {real.parent}"
    weights, recipe = (shlex.quote(str(path / name)) for name in ("model.safetensors", "recipe.yaml"))
    return f"{message}. To begin a new run with its weights: worldsize train {recipe} --model.weights {weights}"


def _command(run: Path) -> str:
    return f"To continue the run: worldsize train --resume {shlex.quote(str(run))}"
