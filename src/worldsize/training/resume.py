"""What makes a run one run: the facts that must be equal on all ranks and must not change when the run resumes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unicodedata import normalize

from worldsize import checkpoint, parallel
from worldsize.config.recipe import Recipe
from worldsize.config.wording import count
from worldsize.data import file_sizes
from worldsize.data.samples import Dataset
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.world import World
from worldsize.errors import CheckpointError, UserError, refuse_closed
from worldsize.runs import resumable
from worldsize.runs.run_folder import RunFolder
from worldsize.runs.run_lock import RunLock
from worldsize.training import environment
from worldsize.training.precision import Precision
from worldsize.training.request import TrainRequest

log = logging.getLogger(__name__)

_MOST_NAMES = 5


def fixed_facts(
    recipe: Recipe, plan: BatchPlan, dataset: Dataset, precision: Precision, world: World, teacher: Path | None = None
) -> dict[str, Any]:
    """What must not change during a run, as JSON values; part of every checkpoint.

    Args:
        teacher: the checkpoint of the network that also teaches, if there is one.
    """
    identity = parallel.identity(recipe)
    if parallel.strategy_class(recipe.parallel).depends_on_world_size(recipe.parallel):
        identity["parallel"]["processes"] = world.size
    looked_at = world.from_main(world.collectively(lambda: file_sizes.digest(dataset) if world.is_main else None))
    taught = {"teacher": checkpoint.network_digest(teacher)} if teacher is not None else {}
    return taught | {
        "identity": identity,
        "data": dataset.fingerprint,
        "sizes": looked_at,
        "classes": list(dataset.classes),
        "precision": precision.name,
        "global_batch": plan.global_batch,
        "total_steps": plan.total_steps(recipe, len(dataset.train)),
    }


def check_ranks(world: World, facts: dict[str, Any], same_bits: bool) -> None:
    """Refuse ranks with different data or libraries, which would compute different numbers without an error.

    Different processors, GPUs or drivers round differently, and the slowest sets the pace: rank 0 logs a warning.

    Args:
        same_bits: refuse these too.

    Raises:
        UserError: on all ranks; names the difference.
    """
    own = {name: facts.get(name) for name in ("data", "precision", "teacher")} | {"versions": environment.versions()}
    values = world.gather((own, environment.hardware(world.device.type, world.threads)))
    first, first_hardware = values[0]
    for rank, (other, hardware) in enumerate(values):
        for what in own:
            if other[what] != first[what]:
                raise UserError(f"{what} of ranks 0 and {rank} differ: {first[what]} and {other[what]}")
        different = [f"{k}: {v} and {hardware[k]}" for k, v in first_hardware.items() if v != hardware[k]]
        if different:
            message = f"ranks 0 and {rank} run on different hardware: {'; '.join(different)}"
            if same_bits:
                raise UserError(message)
            if world.is_main:
                log.warning("%s. The slowest sets the pace, and the numbers depend on it by rounding", message)
            return


def autoresumed(request: TrainRequest, world: World) -> TrainRequest:
    """With --autoresume, the same request as one that resumes, if rank 0 finds its run.

    Raises:
        UserError: what rank 0 finds is not a run.
        CheckpointError: the run has lost its checkpoints.
        StoreUnreachable: its disk or the network does not answer.
    """
    if not request.autoresume or request.name is None:
        return request
    folder = RunFolder(request.out / request.name)
    if not world.from_main(world.collectively(lambda: _has_begun(folder) if world.is_main else False)):
        return request
    return replace(request, resume=folder)


def _has_begun(folder: RunFolder) -> bool:
    """Whether there is a run to continue; errors as `autoresumed`, or OSError."""
    refuse_closed(folder.path)
    if not folder.path.exists():
        return False
    resumable.check_started(folder)
    return True


def locked(request: TrainRequest, world: World, lock: RunLock) -> TrainRequest:
    """The request, after rank 0 has locked the run that it resumes.

    Raises:
        UserError: another process trains it.
        RunInUse: the same, with ``--autoresume``.
    """
    folder = request.resume
    if folder is not None:
        world.collectively(lambda: lock.acquire(folder.lock, request.autoresume) if world.is_main else None)
    return request


def snapshot_to_resume(
    request: TrainRequest, facts: dict[str, Any], world: World
) -> tuple[checkpoint.Snapshot | None, dict[str, Any]]:
    """The state to resume from, the same on all ranks; None for a new run, or one without a checkpoint. And the run's facts.

    A run that an older version began keeps its identity, with which the chain of its steps begins.

    Raises:
        CheckpointError: no intact checkpoint is left.
        UserError: the recipe, the data or the precision changed, which ``allow_changes`` permits except for the classes; or
            the run has passed ``stop_after``.
    """
    if request.resume is None:
        return None, facts
    # Asynchronous ranks share nothing: rank 0 saves as if it were alone.
    owner = 0 if parallel.strategy_class(request.recipe.parallel).asynchronous else world.rank
    snapshot = _newest(request.resume.checkpoints, owner, world)
    if snapshot is None:
        if world.is_main:
            log.warning("%s has no checkpoint yet: training starts again at step 0", request.resume.path)
        return None, facts
    if request.stop_after is not None and snapshot.step >= request.stop_after:
        raise UserError(f"{request.folder} has already done {count(snapshot.step, 'step')}: pass a later --stop-after")
    _check_unchanged(request, snapshot, facts)
    # What was noted about the samples is noted by their numbers, which mean other images in other data.
    noted = snapshot if snapshot.state["data"] == facts["data"] else replace(snapshot, samples={})
    identity = snapshot.state["identity"]
    return noted, facts | ({"identity": identity} if parallel.completed(identity) == facts["identity"] else {})


def _newest(folder: Path, owner: int, world: World) -> checkpoint.Snapshot | None:
    """The newest checkpoint that all ranks can read, with the own state of rank ``owner``; None if there is none.

    Raises:
        CheckpointError: there are checkpoints, but each is damaged.
        StoreUnreachable: one cannot be read, because of its disk or the network.
        UserError: a rank does not see rank 0's checkpoints.
    """
    listed = world.collectively(lambda: checkpoint.list_checkpoints(folder) if world.is_main else [])
    candidates = world.from_main(listed)
    world.collectively(lambda: _assert_visible(candidates))
    for candidate in candidates:
        snapshot, damage = world.collectively(partial(_read, candidate, owner))
        damages = [other for other in world.gather(damage) if other]
        if not damages:
            return snapshot
        if world.is_main:
            log.warning("skipping checkpoint: %s", damages[0])
    if candidates:
        raise checkpoint.all_damaged(folder, len(candidates))
    return None


def _read(path: Path, owner: int) -> tuple[checkpoint.Snapshot | None, str]:
    """The checkpoint, or what is damaged in it."""
    try:
        return checkpoint.read(path, owner), ""
    except CheckpointError as error:
        return None, str(error)


def _assert_visible(checkpoints: list[Path]) -> None:
    for path in checkpoints:
        refuse_closed(path)
        if not path.is_dir():
            raise UserError(
                f"{path} does not exist on {socket.gethostname()}, where a process of this run resumes: "
                "put the run folder on storage that all machines share, or copy it to the same path on each"
            )


def has_ended(state: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether a checkpoint with this state is the end of its run."""
    return bool(state["step"] >= facts["total_steps"] and state["evaluated_step"] == state["step"])


def _check_unchanged(request: TrainRequest, snapshot: checkpoint.Snapshot, facts: dict[str, Any]) -> None:
    old = snapshot.state
    if old["global_batch"] != facts["global_batch"]:
        raise UserError(
            f"this run has a global batch of {old['global_batch']} and cannot continue with {facts['global_batch']}: "
            "steps, epochs and learning rate would change their meaning. Start a new run with --model.weights "
            "CHECKPOINT/model.safetensors"
            + (", or resume with the same number of processes" if request.recipe.per_process_batch else "")
        )
    changes = _changes(parallel.completed(old["identity"]), facts["identity"])
    changes += _changes({"precision in use": old["precision"]}, {"precision in use": facts["precision"]})
    if old["data"] != facts["data"]:
        changes.append(f"the dataset: was {_brief(old['data'])}, is {_brief(facts['data'])}")
    elif other := same_names_other_sizes(old, facts):
        changes.append(f"the dataset: the images of {' and '.join(other)} have the same names, but other sizes in bytes")
    if (classes := class_changes(old.get("classes", facts["classes"]), facts["classes"])) is not None:
        raise UserError(
            f"this run cannot resume, because the classes of the dataset changed: {classes}. Its network numbers its "
            "answers in the old order, so --allow-changes does not apply. Undo the change, or start a new run with "
            "--model.weights CHECKPOINT/model.safetensors" + "".join(f"\nAlso changed: {change}" for change in changes)
        )
    # Checkpoints of older versions do not have the teacher's weights.
    if {"teacher"} <= old.keys() & facts.keys() and old["teacher"] != facts["teacher"]:
        changes.append(f"the weights of loss.teacher: were {old['teacher'][:8]}, are {facts['teacher'][:8]}")
    if changes and not request.allow_changes:
        raise UserError(
            "this run cannot resume, because its settings or data changed:\n  "
            + "\n  ".join(changes)
            + "\nUndo the changes, or pass --allow-changes to continue anyway."
        )
    for change in changes:
        log.warning("continuing although this changed: %s", change)


def same_names_other_sizes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The splits whose files have other sizes. Checkpoints of older versions do not have the sizes."""
    before, after = old.get("sizes") or {}, new.get("sizes") or {}
    return [split for split in before if split in after and before[split] != after[split]]


def _changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before != after and all(value is None or isinstance(value, dict) for value in (before, after)):
            found += _changes(before or {}, after or {}, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: was {before}, is {after}")
    return found


def class_changes(old: list[str], new: list[str]) -> str | None:
    """What differs between the classes, and the first label that means another class; None if nothing does."""
    if old == new:
        return None
    gone, added = sorted(set(old) - set(new)), sorted(set(new) - set(old))
    # Names that look alike, for example in another Unicode form, are shown by their code points.
    alike = {normalize("NFC", name).strip() for name in gone} & {normalize("NFC", name).strip() for name in added}
    shown = ascii if alike else repr
    parts = [f"{what}: {_listed(names, shown)}" for what, names in (("gone", gone), ("new", added)) if names]
    label = next((i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
    if label is not None:
        parts.append(f"label {label} was {shown(old[label])}, is {shown(new[label])}")
    return "; ".join(parts if gone or added else ["their order", *parts])


def _listed(names: list[str], shown: Callable[[str], str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(shown, names[:_MOST_NAMES])) + more


def _brief(fingerprint: dict[str, Any]) -> str:
    return f"{fingerprint['train_samples']:,}+{fingerprint['val_samples']:,} images ({fingerprint['train'][:8]})"
