"""Checkpoints: folders that are complete, verified, and readable without this program.

``step-00001234/`` contains

- ``model.safetensors``: the weights under torchvision's own names, running statistics averaged over ranks;
- ``samples.safetensors``: the loss and the margin of each training sample so far (see `training.margins`), if collected;
- ``average.safetensors``: the averaged weights in the same form, if the recipe averages;
- ``optimizer.safetensors``: ``KIND/PARAMETER``;
- ``rank-00003.safetensors``: ``KIND/NAME``, the state that only rank 3 has; one file for each rank that has any;
- ``state.json``: position, loss scale, results, data fingerprint, world size, versions;
- ``recipe.yaml``: the resolved recipe;
- ``manifest.json``: size and SHA-256 of each of these.

In format 1, ``ranks.safetensors`` contains the state of all ranks as ``RANK/KIND/NAME``. The newest valid checkpoint is
found by scanning and checking, never through a pointer file. Nothing is unpickled. `checkpoint.writer` writes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from worldsize.checkpoint.state_file import read_state
from worldsize.errors import CheckpointError, StoreUnreachable, of_the_place
from worldsize.runs import resumable, run_folder

log = logging.getLogger(__name__)

FORMAT = 2
_OF_RANK = re.compile(r"rank-(\d{5,})\.safetensors")
_ALL_RANKS = "ranks.safetensors"  # format 1
AVERAGE = "average.safetensors"
SAMPLES = "samples.safetensors"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """Everything the next step depends on, as copies on the CPU in any memory layout.

    ``ranks`` has the state that differs between ranks, as ``KIND/NAME`` by rank: of one rank, or of several. ``wait``
    returns when the copies are complete. ``average`` is empty without averaged weights, and
    ``samples`` without `margins.Margins`.
    """

    model: Tensors
    optimizer: Tensors
    ranks: dict[int, Tensors]
    state: dict[str, Any]
    recipe: str
    wait: Callable[[], None] = lambda: None
    average: Tensors = field(default_factory=dict)
    samples: Tensors = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state["step"])


def check(checkpoint: Path, rank: int | None = None, hashes: bool = True) -> None:
    """Compare the files of a checkpoint with its manifest.

    Args:
        rank: read only what this rank needs: not the files of other ranks, of which rank 0 checks the sizes.
        hashes: compare the hashes too, not only the sizes.

    Raises:
        CheckpointError: missing or damaged; the message names the file.
        StoreUnreachable: it cannot be read, because of its disk or the network.
    """
    _check(checkpoint, _manifest(checkpoint), rank, hashes)


@contextmanager
def _read(checkpoint: Path) -> Iterator[None]:
    """Around reading its files: a disk that does not answer damages none, or a run would go back to an older checkpoint.

    Raises:
        StoreUnreachable: a file cannot be read, because of its disk or the network.
    """
    try:
        yield
    except OSError as error:
        if not of_the_place(error):
            raise
        raise StoreUnreachable(
            f"{error.filename or checkpoint} cannot be read: {error.strerror}. If that lasts, move {checkpoint} out of the "
            "run: an older checkpoint is used then"
        ) from None


def _manifest(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """The size and the SHA-256 of each file.

    Raises:
        CheckpointError: the manifest is missing, damaged or of an unknown format.
        StoreUnreachable: as `check`.
    """
    try:
        with _read(checkpoint):
            text = (checkpoint / "manifest.json").read_text()
        manifest = json.loads(text, object_pairs_hook=_unique)
        if manifest["format"] not in (1, FORMAT):
            raise CheckpointError(
                f"{checkpoint}: format {manifest['format']} is not supported; this version reads 1 to {FORMAT}"
            )
        files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: manifest.json is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint}: manifest.json is damaged ({error})") from None
    expected = {"model.safetensors", "optimizer.safetensors", "state.json", "recipe.yaml"}
    if manifest["format"] == 1:
        expected.add(_ALL_RANKS)
    if missing := expected - files.keys():
        raise CheckpointError(f"{checkpoint}: the manifest does not list {', '.join(sorted(missing))}")
    return files


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. One flipped bit makes the name of a rank's file that of another rank's, of which json keeps one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def _check(checkpoint: Path, files: dict[str, tuple[int, str]], rank: int | None, hashes: bool = True) -> None:
    for name, (size, digest) in files.items():
        of_another = rank is not None and rank_of(name) not in (None, rank)
        if of_another and rank != 0:
            continue
        path = checkpoint / name
        with _read(checkpoint):
            if path.parent != checkpoint or path.is_symlink():
                raise CheckpointError(f"{checkpoint}: {name} is outside the checkpoint folder")
            if (actual := _size(path)) is None:
                raise CheckpointError(f"{checkpoint}: {name} is missing")
            if actual != size:
                raise CheckpointError(f"{checkpoint}: {name} has {actual} bytes instead of {size}")
            if hashes and not of_another and sha256(path) != digest:
                raise CheckpointError(f"{checkpoint}: {name} is damaged (SHA-256 mismatch)")


def _size(path: Path) -> int | None:
    """The size of a file in bytes, None if it is missing. Raises OSError, which `Path.is_file` hides since Python 3.14."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def network_digest(checkpoint: Path) -> str:
    """The SHA-256 of the weights that the checkpoint's network is used with: the average, if there is one.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    files = _manifest(checkpoint)
    return files[AVERAGE if AVERAGE in files else "model.safetensors"][1]


def digest(checkpoint: Path, name: str) -> str:
    """The SHA-256 of a file of the checkpoint, as its manifest states it. Raises CheckpointError."""
    return _manifest(checkpoint)[name][1]


def rank_file(rank: int) -> str:
    """The name of the file with the state of one rank."""
    return f"rank-{rank:05d}.safetensors"


def rank_of(name: str) -> int | None:
    """The rank whose state this file contains; None for a file of all ranks."""
    match = _OF_RANK.fullmatch(name)
    return int(match[1]) if match else None


def read(checkpoint: Path, rank: int | None = None) -> Snapshot:
    """Check a checkpoint, then load it.

    Args:
        rank: load only this rank's own state, and check only the files that this needs.

    Raises:
        CheckpointError: it is damaged.
        StoreUnreachable: as `check`.
    """
    files = _manifest(checkpoint)
    _check(checkpoint, files, rank)
    try:
        model, optimizer = (load_file(checkpoint / f"{name}.safetensors") for name in ("model", "optimizer"))
        ranks = {
            owner: load_file(checkpoint / name)
            for name in files
            if (owner := rank_of(name)) is not None and rank in (None, owner)
        }
        if _ALL_RANKS in files:
            ranks = _by_rank(load_file(checkpoint / _ALL_RANKS))
        average, samples = (load_file(checkpoint / name) if name in files else {} for name in (AVERAGE, SAMPLES))
        with _read(checkpoint):
            state = read_state(checkpoint)
            recipe = (checkpoint / "recipe.yaml").read_text()
        return Snapshot(model, optimizer, ranks, state, recipe, average=average, samples=samples)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: {error}") from None


def _by_rank(tensors: Tensors) -> dict[int, Tensors]:
    found: dict[int, Tensors] = {}
    for key, tensor in tensors.items():
        rank, _, name = key.partition("/")
        found.setdefault(int(rank), {})[name] = tensor
    return found


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, newest step first, without checking them."""
    return sorted(run_folder.checkpoint_folders(folder), key=run_folder.step_of, reverse=True)


def newest_valid(folder: Path, rank: int | None = None) -> Path | None:
    """The newest valid checkpoint; damaged ones are logged and skipped.

    Args:
        rank: as in `check`.

    Returns:
        None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints, but all of them are damaged.
        StoreUnreachable: as `check`.
    """
    if (newest := next(_valid(folder, rank), None)) is None and (candidates := list_checkpoints(folder)):
        raise all_damaged(folder, len(candidates))
    return newest


def newest_finite(folder: Path, rank: int | None = None) -> Path | None:
    """The newest valid checkpoint whose weights are all finite, None if there is none.

    A step that makes them infinite has a finite loss itself: only the next step shows it. ``rank`` is as in `check`.
    """
    return next((path for path in _valid(folder, rank) if _is_finite(path)), None)


def _valid(folder: Path, rank: int | None) -> Iterator[Path]:
    """The valid checkpoints, newest first; damaged ones are logged."""
    for candidate in list_checkpoints(folder):
        try:
            check(candidate, rank)
        except CheckpointError as error:
            log.warning("skipping checkpoint: %s", error)
        else:
            yield candidate


def _is_finite(checkpoint: Path) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in load_file(checkpoint / "model.safetensors").values())


def all_damaged(folder: Path, checkpoints: int) -> CheckpointError:
    """The error when none of the checkpoints is valid."""
    return CheckpointError(f"all {checkpoints} checkpoints in {folder} are damaged; see the log for details")


def find(target: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest valid one of a run.

    Raises:
        CheckpointError: damaged, or the run has none.
        StoreUnreachable: as `check`.
        UserError: neither a checkpoint nor a run.
    """
    if (target / "manifest.json").is_file():
        check(target)
        return target
    folder = run_folder.open_existing(target)
    if (newest := newest_valid(folder.checkpoints)) is None:
        resumable.check(folder)
        raise CheckpointError(f"{target} has no checkpoint yet")
    return newest


def run_of(checkpoint: Path) -> Path:
    """The absolute path of the run, of RUN/checkpoints/step-N, which may be relative to a folder in the run.

    Links are not followed: their names are those that the user knows.
    """
    return Path(os.path.normpath(checkpoint.absolute())).parent.parent


def score_of(checkpoint: Path) -> float | None:
    """The validation top-1 stored with a checkpoint, or the mAP if images have several labels.

    None if it was not evaluated or cannot be read.
    """
    try:
        evaluation = read_state(checkpoint).get("evaluation")
        if not evaluation:
            return None
        return float(evaluation["top1"] if evaluation.get("map") is None else evaluation["map"])
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return None


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
