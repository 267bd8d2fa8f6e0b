"""Checkpoints: folders that are complete, verified, and readable without this program.

``step-00001234/`` holds

- ``model.safetensors``: the weights under torchvision's own names, running statistics averaged over ranks;
- ``optimizer.safetensors``: ``KIND/PARAMETER``;
- ``ranks.safetensors``: ``RANK/KIND/NAME``, what each rank keeps for itself;
- ``state.json``: position, loss scale, results, data fingerprint, world size, versions;
- ``recipe.yaml``: the resolved recipe;
- ``manifest.json``: size and SHA-256 of each of these.

It is written beside its final place under a temporary name; every file is flushed to disk, then the folder, then
it is renamed. The newest valid one is found by scanning and checking, never by a pointer. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from worldsize.errors import CheckpointError

log = logging.getLogger(__name__)

FORMAT = 1
_NAME = re.compile(r"step-\d{8,}")
_TENSORS = ("model", "optimizer", "ranks")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """All that the next step depends on, as copies on the CPU."""

    model: Tensors
    optimizer: Tensors
    ranks: Tensors
    state: dict[str, Any]
    recipe: str

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return int(self.state["step"])


def copy(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Contiguous copies on the CPU, which training may no longer change."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write the snapshot as ``folder/step-XXXXXXXX``; it appears whole or not at all.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    final = folder / f"step-{snapshot.step:08d}"
    temporary = folder / f"{final.name}.tmp-{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name in _TENSORS:
            _save_tensors(temporary / f"{name}.safetensors", getattr(snapshot, name))
        (temporary / "state.json").write_text(json.dumps(snapshot.state, indent=1, allow_nan=False) + "\n")
        (temporary / "recipe.yaml").write_text(snapshot.recipe)
        files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(temporary.iterdir())}
        (temporary / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n")
        for path in temporary.iterdir():
            _flush(path)
        _flush(temporary)
        aside = folder / f"{final.name}.tmp-old-{os.getpid()}"
        if final.exists():  # the same step again: after an evaluation, or after going on from before it
            final.rename(aside)
        temporary.rename(final)
        _flush(folder)
        shutil.rmtree(aside, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _save_tensors(path: Path, tensors: Tensors) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        # safetensors reports a full disk in its own words; to the callers it is the OSError it was.
        raise OSError(str(error)) from error


def check(checkpoint: Path) -> None:
    """Read the whole checkpoint and compare it with its manifest.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{checkpoint}: format {manifest['format']}, and this version reads {FORMAT}")
        files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: manifest.json is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint}: manifest.json is damaged ({error})") from None
    expected = {f"{name}.safetensors" for name in _TENSORS} | {"state.json", "recipe.yaml"}
    if missing := expected - files.keys():
        raise CheckpointError(f"{checkpoint}: the manifest does not list {', '.join(sorted(missing))}")
    for name, (size, digest) in files.items():
        path = checkpoint / name
        if path.parent != checkpoint or path.is_symlink():
            raise CheckpointError(f"{checkpoint}: {name} leads out of the folder")
        if not path.is_file():
            raise CheckpointError(f"{checkpoint}: {name} is missing")
        if (actual := path.stat().st_size) != size:
            raise CheckpointError(f"{checkpoint}: {name} has {actual} bytes instead of {size}")
        if _sha256(path) != digest:
            raise CheckpointError(f"{checkpoint}: {name} is damaged (its SHA-256 is wrong)")


def read(checkpoint: Path) -> Snapshot:
    """Check a checkpoint, then load it.

    Raises:
        CheckpointError: it is damaged.
    """
    check(checkpoint)
    try:
        model, optimizer, ranks = (load_file(checkpoint / f"{name}.safetensors") for name in _TENSORS)
        state = json.loads((checkpoint / "state.json").read_text())
        return Snapshot(model, optimizer, ranks, state, (checkpoint / "recipe.yaml").read_text())
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: {error}") from None


def found(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, newest step first, checked or not."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step_of, reverse=True)


def newest_valid(folder: Path) -> Path | None:
    """The newest checkpoint that can be trusted; damaged ones are named in the log and passed over.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        CheckpointError: there are some, and every one is damaged.
    """
    candidates = found(folder)
    for candidate in candidates:
        try:
            check(candidate)
            return candidate
        except CheckpointError as error:
            log.warning("checkpoint refused: %s", error)
    if candidates:
        raise CheckpointError(f"all {len(candidates)} checkpoints in {folder} are damaged; the log says how")
    return None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def top1_of(checkpoint: Path) -> float | None:
    """The validation top-1 stored with a checkpoint, if it was evaluated and can be read."""
    try:
        evaluation = json.loads((checkpoint / "state.json").read_text()).get("evaluation")
        return float(evaluation["top1"]) if evaluation else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prune(folder: Path, step: int, keep: int, best: bool) -> None:
    """Delete all but the ``keep`` newest up to ``step`` and, if asked, the one of them with the highest top-1.

    Those beyond ``step``, the run's own position, are of a past that was refused when it was resumed.
    """
    everything = found(folder)
    checkpoints = [path for path in everything if _step_of(path) <= step]
    scored = [(score, path) for path in reversed(checkpoints) if (score := top1_of(path)) is not None]
    kept = set(checkpoints[:keep])
    if best and scored:
        kept.add(max(scored, key=lambda pair: pair[0])[1])
    for path in set(everything) - kept:
        shutil.rmtree(path, ignore_errors=True)
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary folders of processes that died while they wrote."""
    for path in folder.glob("step-*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


class Writer:
    """Writes snapshots on a thread of its own, one at a time, and prunes after each.

    A snapshot that cannot be written (a full disk) is a warning; the older checkpoints stay, training goes on.
    """

    def __init__(self, folder: Path, keep: int, best: bool) -> None:
        self._folder = folder
        self._keep = keep
        self._best = best
        self._thread: threading.Thread | None = None
        self._newest: Path | None = None
        self._failed: str | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Begin to write; waits for the write before it."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def wait(self) -> Path | None:
        """Until all is on disk. Returns the newest checkpoint written here, None if there is none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._newest

    @property
    def failed(self) -> str | None:
        """Why the last snapshot is not on disk, or None if it is."""
        return self._failed

    def _write(self, snapshot: Snapshot) -> None:
        try:
            path = write(self._folder, snapshot)
            check(path)  # the older ones go only after the new one was read back whole
        except Exception as error:  # nobody waits for this thread's exceptions, and no save may be lost in silence
            self._failed = str(error) or type(error).__name__
            log.warning(
                "the checkpoint of step %d could not be saved (%s); training goes on, older ones stay", snapshot.step, error
            )
            return
        self._failed, self._newest = None, path
        prune(self._folder, snapshot.step, self._keep, self._best)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
