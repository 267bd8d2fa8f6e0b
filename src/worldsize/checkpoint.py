"""Checkpoints: folders that are complete, verified, and readable without this program.

``step-00001234/`` contains

- ``model.safetensors``: the weights under torchvision's own names, running statistics averaged over ranks;
- ``optimizer.safetensors``: ``KIND/PARAMETER``;
- ``ranks.safetensors``: ``RANK/KIND/NAME``, the state that differs between ranks;
- ``state.json``: position, loss scale, results, data fingerprint, world size, versions;
- ``recipe.yaml``: the resolved recipe;
- ``manifest.json``: size and SHA-256 of each of these.

A checkpoint is written under a temporary name in the same folder; every file is flushed to disk, then the folder,
then it is renamed. The newest valid one is found by scanning and checking, never through a pointer file. Nothing is
unpickled.
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

from worldsize import run
from worldsize.errors import CheckpointError
from worldsize.recipe import Checkpoint as Retention

log = logging.getLogger(__name__)

FORMAT = 1
_NAME = re.compile(r"step-\d{8,}")
_TENSORS = ("model", "optimizer", "ranks")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """Everything the next step depends on, as copies on the CPU."""

    model: Tensors
    optimizer: Tensors
    ranks: Tensors
    state: dict[str, Any]
    recipe: str

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state["step"])


def copy(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Contiguous copies on the CPU, independent of further training. Waits once for a GPU, not for each tensor."""
    copies = {name: _to_host(tensor.detach()) for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    # Only copies to pinned memory return before they are done.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write the snapshot as ``folder/step-XXXXXXXX``, atomically.

    Raises:
        OSError: it could not be written; no partial files remain.
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
        replaced = folder / f"{final.name}.tmp-old-{os.getpid()}"
        if final.exists():  # saved again: after an evaluation, or after resuming from an earlier step
            final.rename(replaced)
        temporary.rename(final)
        _flush(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _save_tensors(path: Path, tensors: Tensors) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        # safetensors raises its own error for a full disk; callers expect OSError.
        raise OSError(str(error)) from error


def check(checkpoint: Path) -> None:
    """Read the complete checkpoint and compare it with its manifest.

    Raises:
        CheckpointError: missing or damaged; the message names the file.
    """
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{checkpoint}: format {manifest['format']} is not supported; this version reads {FORMAT}")
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
            raise CheckpointError(f"{checkpoint}: {name} is outside the checkpoint folder")
        if not path.is_file():
            raise CheckpointError(f"{checkpoint}: {name} is missing")
        if (actual := path.stat().st_size) != size:
            raise CheckpointError(f"{checkpoint}: {name} has {actual} bytes instead of {size}")
        if _sha256(path) != digest:
            raise CheckpointError(f"{checkpoint}: {name} is damaged (SHA-256 mismatch)")


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


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, newest step first, without checking them."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step_of, reverse=True)


def newest_valid(folder: Path) -> Path | None:
    """The newest valid checkpoint; damaged ones are logged and skipped.

    Returns:
        None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, but all of them are damaged.
    """
    candidates = list_checkpoints(folder)
    for candidate in candidates:
        try:
            check(candidate)
            return candidate
        except CheckpointError as error:
            log.warning("skipping checkpoint: %s", error)
    if candidates:
        raise CheckpointError(f"all {len(candidates)} checkpoints in {folder} are damaged; see the log for details")
    return None


def find(target: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest valid one of a run.

    Raises:
        CheckpointError: damaged, or the run has none.
        UserError: neither a checkpoint nor a run.
    """
    if (target / "manifest.json").is_file():
        check(target)
        return target
    newest = newest_valid(run.open_existing(target).checkpoints)
    if newest is None:
        raise CheckpointError(f"{target} has no checkpoint yet")
    return newest


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def top1_of(checkpoint: Path) -> float | None:
    """The validation top-1 stored with a checkpoint; None if it was not evaluated or cannot be read."""
    try:
        evaluation = json.loads((checkpoint / "state.json").read_text()).get("evaluation")
        return float(evaluation["top1"]) if evaluation else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prune(folder: Path, step: int, settings: Retention) -> None:
    """Delete all checkpoints up to ``step`` that the settings do not keep.

    Checkpoints after ``step``, the run's current position, are damaged ones that were skipped when the run resumed.
    """
    everything = list_checkpoints(folder)
    checkpoints = [path for path in everything if _step_of(path) <= step]
    scored = [(score, path) for path in reversed(checkpoints) if (score := top1_of(path)) is not None]
    kept = set(checkpoints[: settings.keep])
    if settings.best and scored:
        kept.add(max(scored, key=lambda pair: pair[0])[1])
    if settings.history != "none":
        older = checkpoints if settings.history == "all" else thinned(checkpoints, step)
        kept |= set(older)
    for path in set(everything) - kept:
        shutil.rmtree(path, ignore_errors=True)
    remove_leftovers(folder)


def thinned(checkpoints: list[Path], step: int) -> list[Path]:
    """The oldest and the newest checkpoint of each age from 2**k to 2**(k+1) - 1 steps before ``step``.

    The distance between two of them is at most twice the age of the newer one, if checkpoints are saved regularly.
    """
    by_age = sorted(checkpoints, key=_step_of)
    newest = {(step - _step_of(path)).bit_length(): path for path in by_age}
    oldest = {(step - _step_of(path)).bit_length(): path for path in reversed(by_age)}
    return list({*newest.values(), *oldest.values()})


def remove_leftovers(folder: Path) -> None:
    """Delete temporary folders of processes that died while writing."""
    for path in folder.glob("step-*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


class Writer:
    """Writes snapshots on a background thread, one at a time, and prunes after each.

    If a snapshot cannot be written (disk full), logs a warning; older checkpoints are kept and training continues.
    """

    def __init__(self, folder: Path, settings: Retention) -> None:
        self._folder = folder
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._newest: Path | None = None
        self._failed: str | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Start writing in the background; waits for the previous write first."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def wait(self) -> Path | None:
        """Wait until the write is done. Returns the newest checkpoint written by this object, or None."""
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
            check(path)  # older checkpoints are deleted only after the new one was read back
        except Exception as error:  # exceptions of this thread reach nobody, and a failed save must be reported
            self._failed = str(error) or type(error).__name__
            log.warning(
                "the checkpoint of step %d could not be saved (%s); training continues, older checkpoints are kept",
                snapshot.step,
                error,
            )
            return
        self._failed, self._newest = None, path
        prune(self._folder, snapshot.step, self._settings)


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
