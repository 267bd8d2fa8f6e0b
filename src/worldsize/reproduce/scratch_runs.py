"""Runs parts of a training in a scratch folder, with the command that a user would type."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worldsize import checkpoint, parallel
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe, Track
from worldsize.distributed.rank import local_rank_info, threads_per_process
from worldsize.errors import CheckpointError, UserError, of_system
from worldsize.models import trusted_code
from worldsize.reproduce import training_process
from worldsize.runs.run_folder import RunFolder
from worldsize.training import environment

# What every version has written to environment.json, and commands here need.
_ENVIRONMENT = {"world_size": int, "device": str, "versions": dict, "precision": str, "strategy": str}


@dataclass(frozen=True)
class Steps:
    """Steps that were computed: the records of metrics.jsonl in order, and the checkpoint after the last one."""

    records: list[dict[str, Any]]
    checkpoint: Path

    @property
    def sha256(self) -> str:
        """Of the weights and running statistics, not averaged."""
        return hashlib.sha256((self.checkpoint / "model.safetensors").read_bytes()).hexdigest()


def only_steps(recipe: Recipe) -> Recipe:
    """The recipe without evaluations, trackers, or checkpoints before the end. Its steps compute the same."""
    checkpoints = recipe.checkpoint.model_copy(update={"every_steps": None, "every_epochs": None, "every_seconds": None})
    changes = {"evaluate_every": recipe.epochs + 1, "checkpoint": checkpoints, "track": Track()}
    return recipe.model_copy(update=changes)


def train(recipe: Recipe, out: Path, name: str, procs: int, until: int) -> Steps:
    """Train the recipe from the start to step ``until``, or to its end if that is earlier, as ``out/name``.

    Raises:
        ComputationFailed: the training failed, or was stopped before.
        UserError, StoreUnreachable: the folder ``out`` takes no files.
    """
    path = out / f"{name}.yaml"
    write_recipe(recipe, path)
    return _run([str(path), "--out", str(out), "--name", name], out / name, procs, until)


def resume(folder: Path, procs: int, until: int) -> Steps:
    """Continue the run in ``folder`` to step ``until``; as `train`."""
    return _run(["--resume", str(folder)], folder, procs, until)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write `only_steps` of the recipe to a file of a scratch folder.

    Raises:
        UserError, StoreUnreachable: it cannot be written, such as to a disk that is full.
    """
    try:
        path.write_text(recipe_files.to_yaml(only_steps(recipe)), "utf-8")
    except OSError as error:
        raise of_system(_unwritable(path, error.strerror), error) from None


def _unwritable(path: Path | str, reason: str | None) -> str:
    return f"cannot write {path} ({reason}): choose another folder for temporary files with TMPDIR"


def _run(words: list[str], folder: Path, procs: int, until: int) -> Steps:
    training_process.train(words, RunFolder(folder).metrics, procs, until)
    return computed(folder)


def computed(folder: Path) -> Steps:
    """What a training in the run folder ``folder`` has computed.

    Raises:
        CheckpointError: it has no checkpoint.
    """
    newest = checkpoint.newest_valid(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{folder} has no checkpoint")
    return Steps(steps_of(RunFolder(folder)), newest)


def steps_of(run: RunFolder) -> list[dict[str, Any]]:
    """The step records of metrics.jsonl, in order; as `records_of`."""
    return records_of(run, "step")


def records_of(run: RunFolder, kind: Literal["step", "epoch"]) -> list[dict[str, Any]]:
    """The records of this kind in metrics.jsonl, in order.

    Raises:
        UserError: it is damaged.
        UserError, StoreUnreachable: it cannot be read.
    """
    try:
        lines = run.metrics.read_text("utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except OSError as error:
        raise of_system(f"{run.metrics}: {error.strerror}", error) from None
    except ValueError:
        raise UserError(f"{run.metrics} is damaged: a line is not JSON") from None
    for number, record in enumerate(records, start=1):
        if not _is_record(record):
            raise UserError(f"{run.metrics} is damaged: line {number:,} does not have the kind and the step of a record")
    return [record for record in records if record["kind"] == kind]


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return False
    return value["kind"] not in ("step", "epoch") or isinstance(value.get("step"), int)


def checkpoints(run: RunFolder) -> dict[int, tuple[Path, dict[str, Any]]]:
    """The run's intact checkpoints: path and state.json by step.

    Raises:
        CheckpointError: there is none.
    """
    found = {}
    for path in checkpoint.list_checkpoints(run.checkpoints):
        try:
            checkpoint.check(path)
            state = checkpoint.read_state(path)
            found[int(state["step"])] = (path, state)
        except CheckpointError:
            continue
    if not found:
        raise CheckpointError(f"{run.path} has no intact checkpoint")
    return found


def compute_again(run: RunFolder, start: Path | None, until: int, procs: int, folder: Path) -> Steps:
    """Compute the run's steps from the checkpoint ``start`` (None: from the beginning) to ``until``, in ``folder``.

    Raises:
        ComputationFailed: the training failed, or was stopped before.
        UserError: the network is code that this user has not trained.
        UserError, StoreUnreachable: ``folder`` takes no files.
    """
    # `auto` could mean another device here.
    recipe = at_size(recipe_files.load(str(run.recipe)), procs).model_copy(update={"device": device_of(run)})
    trusted_code.check(recipe)  # here: the command that trains takes what it is given for the user's own
    if (listings := run.path.parent / ".cache").is_dir():
        with suppress(shutil.Error):  # without them, the folders are listed again
            shutil.copytree(listings, folder / ".cache")
    if start is None:
        return train(recipe, folder, folder_of_steps(folder).name, procs, until)
    again = folder_of_steps(folder)
    _copy(start, again.checkpoints / start.name)
    write_recipe(recipe, again.recipe)
    return resume(again.path, procs, until)


def _copy(source: Path, target: Path) -> None:
    """Copy a folder. Raises UserError, StoreUnreachable: a file cannot be copied, such as to a disk that is full."""
    try:
        shutil.copytree(source, target)
    except shutil.Error as error:
        (_, path, reason), *_ = error.args[0]
        raise UserError(_unwritable(path, reason)) from None


def at_size(recipe: Recipe, procs: int) -> Recipe:
    """The recipe as it runs with ``procs`` processes.

    A run that was resumed with `single` instead of `ddp`, or the other way round, has earlier steps of other processes.
    """
    other = {"single": procs > 1, "ddp": procs == 1}.get(recipe.parallel.strategy, False)
    if not other or not parallel.strategy_class(recipe.parallel).exact(recipe.parallel):
        return recipe
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"strategy": "auto"})})


def folder_of_steps(folder: Path) -> RunFolder:
    """The run in which `compute_again` computes in ``folder``."""
    return RunFolder(folder / "again")


def environment_of(run: RunFolder) -> dict[str, Any]:
    """environment.json of the run.

    Raises:
        UserError: it is missing or damaged, or may not be read.
        StoreUnreachable: its disk or the network does not answer.
    """
    try:
        found = json.loads(run.environment.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        raise UserError(f"{run.environment} is missing or damaged") from None
    except OSError as error:
        raise of_system(f"{run.environment}: {error.strerror}", error) from None
    if not isinstance(found, dict):
        raise UserError(f"{run.environment} is damaged: it is not a JSON object")
    for name, kind in _ENVIRONMENT.items():
        if not isinstance(found.get(name), kind):
            raise UserError(f"{run.environment} is damaged: {name!r} is missing or wrong")
    if not isinstance(found.get("hardware", {}), dict):
        raise UserError(f"{run.environment} is damaged: 'hardware' is wrong")
    return found


def device_of(run: RunFolder) -> Literal["cpu", "cuda"]:
    """The kind of device that the run was computed on."""
    return "cuda" if environment_of(run).get("hardware", {}).get("cuda") else "cpu"


def check_order(run: RunFolder, recipe: Recipe, otherwise: str) -> None:
    """Refuse to compute a run's steps again if nothing determines their order.

    Args:
        otherwise: what to do instead.

    Raises:
        UserError: the run is asynchronous.
    """
    if parallel.strategy_class(recipe.parallel).asynchronous:
        raise UserError(
            f"{run.path} is asynchronous: the order of its updates depends on time, so it cannot be computed again"
            f"{otherwise}"
        )


def check_device(run: RunFolder, otherwise: str) -> None:
    """Refuse to compute a run's steps again on a machine without its kind of device.

    Args:
        otherwise: what to do here instead.

    Raises:
        UserError: the run was computed on a GPU, and there is none.
    """
    if device_of(run) == "cuda" and environment.device_name("cuda") == "none":
        raise UserError(
            f"{run.path} was trained on a GPU ({environment_of(run)['device']}), and torch finds none here: "
            f"use a machine with such a GPU{otherwise}"
        )


def warnings(run: RunFolder, recipe: Recipe, procs: int) -> list[str]:
    """Why bits may differ from the run's although nothing is wrong: another machine, or other versions."""
    recorded = environment_of(run)
    threads = parallel.threads(recipe.parallel) or threads_per_process(local_rank_info(procs))
    old = {"device": recorded["device"], **recorded.get("hardware", {}), **recorded["versions"]}
    new = environment.hardware(device_of(run), threads) | environment.versions()
    return [f"{name}: was {old[name]}, is {new[name]}" for name in new if name in old and old[name] != new[name]]
