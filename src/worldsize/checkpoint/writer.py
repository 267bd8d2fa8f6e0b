"""Writes checkpoints: each rank its own state, rank 0 the rest.

A checkpoint is written under a temporary name in the same folder; every file is flushed to disk, then the folder, then it
is renamed. Ranks that see the same folder write in parallel. Each tells rank 0 the size and the SHA-256 of its file; the
manifest contains what they told.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from worldsize import checkpoint
from worldsize.checkpoint import FORMAT, Snapshot, Tensors, retention
from worldsize.config.recipe import Checkpoint as Retention
from worldsize.distributed.message_tags import CHECKPOINT
from worldsize.distributed.world import World
from worldsize.runs import run_folder
from worldsize.runs.atomic import flush

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

_REPORT_BYTES = 4096
_REASON_CHARACTERS = 300  # each has up to 12 bytes in JSON

# The entries of the manifest: {"bytes": ..., "sha256": ...} by file name.
Files = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Team:
    """The ranks that write one checkpoint together, into a folder that all of them see.

    ``group`` carries their reports, with a tag of their own, so that other messages in it do not matter. ``token`` is part
    of the names of their temporary folders.
    """

    group: ProcessGroup
    rank: int
    size: int
    token: str

    def tell(self, report: Mapping[str, Any]) -> None:
        """Tell rank 0 what this rank wrote: its ``files``, or why it ``failed``."""
        import torch.distributed as dist

        text = json.dumps(report).encode()
        message = torch.zeros(_REPORT_BYTES, dtype=torch.uint8)
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.send(message, dst=0, group=self.group, tag=CHECKPOINT)

    def files(self) -> Files:
        """What the other ranks wrote; waits for them. Called by rank 0, once for each report.

        Raises:
            OSError: a rank could not write.
            RuntimeError: a rank is lost.
        """
        import torch.distributed as dist

        files: Files = {}
        failed: list[str] = []
        message = torch.empty(_REPORT_BYTES, dtype=torch.uint8)
        for rank in range(1, self.size):
            dist.recv(message, src=rank, group=self.group, tag=CHECKPOINT)
            report = json.loads(message.numpy().tobytes().rstrip(b"\0"))
            files |= report.get("files", {})
            failed += [f"rank {rank}: {report['failed']}"] if "failed" in report else []
        if failed:
            raise OSError(failed[0])
        return files


def team(world: World, folder: Path) -> Team | None:
    """How ``world`` writes into ``folder`` together. All ranks must call it.

    Returns:
        None if rank 0 writes for all: there is only one rank, or some do not see rank 0's folder.
    """
    if world.control is None:
        return None
    token = world.from_main(uuid.uuid4().hex[:12])
    probe = folder / f".shared-{token}"
    if world.is_main:
        _create(probe)
    world.barrier()
    # Opened for writing: a folder that is mounted read-only does not count.
    seen = world.gather(_opens(probe))
    if world.is_main:
        probe.unlink(missing_ok=True)
    if all(seen):
        return Team(world.control, world.rank, world.size, token)
    if world.is_main and seen[0]:
        log.warning("rank %d does not see %s: rank 0 writes the checkpoints of all ranks", seen.index(False), folder)
    return None


def _create(path: Path) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    except OSError as error:
        log.warning("cannot write to %s: %s", path.parent, error.strerror)


def _opens(path: Path) -> bool:
    try:
        with open(path, "r+b"):
            return True
    except OSError:
        return False


def _make(folder: Path) -> None:
    """Make the temporary folder of a checkpoint, and the one around it; never that of a run, which somebody has deleted."""
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)


def write(
    folder: Path,
    snapshot: Snapshot,
    name: str = "",
    others: Callable[[], Files] = dict,
    allowed: Callable[[], None] = lambda: None,
) -> Path:
    """Write the snapshot as ``folder/step-XXXXXXXX``, atomically.

    Args:
        name: distinguishes the temporary folder from those of other processes and checkpoints; as in `write_own`.
        others: waits for what other ranks write into the temporary folder.
        allowed: called first; raises OSError if nothing may be written.

    Raises:
        OSError: it could not be written; no partial files remain. Also if the folder around ``folder`` does not exist.
    """
    final = folder / f"step-{snapshot.step:08d}"
    temporary = _temporary(folder, snapshot.step, name)
    try:
        try:
            allowed()
            files = _write_common(temporary, snapshot) | _write_ranks(temporary, snapshot)
        finally:
            theirs = others()  # also after a failure: they may still write into the folder
        (temporary / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files | theirs}, indent=1) + "\n")
        flush(temporary / "manifest.json")
        flush(temporary)
        _publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def write_own(folder: Path, snapshot: Snapshot, name: str) -> Files:
    """Write the state of this rank, which is not rank 0, into the temporary folder of the checkpoint.

    Raises:
        OSError: it could not be written.
    """
    return _write_ranks(_temporary(folder, snapshot.step, name), snapshot)


def _temporary(folder: Path, step: int, name: str) -> Path:
    return folder / f"step-{step:08d}.tmp-{name or os.getpid()}"


def _publish(temporary: Path, final: Path) -> None:
    replaced = temporary.with_name(f"{final.name}{run_folder.REPLACED}{os.getpid()}")
    if final.exists():  # saved again: after an evaluation, or after resuming from an earlier step
        final.rename(replaced)
    try:
        temporary.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_common(folder: Path, snapshot: Snapshot) -> Files:
    _make(folder)
    _save_tensors(folder / "model.safetensors", snapshot.model)
    _save_tensors(folder / "optimizer.safetensors", snapshot.optimizer)
    names = ["model.safetensors", "optimizer.safetensors", "state.json", "recipe.yaml"]
    for name, tensors in ((checkpoint.AVERAGE, snapshot.average), (checkpoint.SAMPLES, snapshot.samples)):
        if tensors:
            _save_tensors(folder / name, tensors)
            names.append(name)
    (folder / "state.json").write_text(json.dumps(snapshot.state, indent=1, allow_nan=False) + "\n")
    (folder / "recipe.yaml").write_text(snapshot.recipe)
    return _flushed(folder, names)


def _write_ranks(folder: Path, snapshot: Snapshot) -> Files:
    """One file for each rank in the snapshot that has any state of its own."""
    own = {checkpoint.rank_file(rank): tensors for rank, tensors in snapshot.ranks.items() if tensors}
    _make(folder)
    for name, tensors in own.items():
        _save_tensors(folder / name, tensors)
    return _flushed(folder, list(own))


def _save_tensors(path: Path, tensors: Tensors) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        # safetensors raises its own error for a full disk; callers expect OSError. Its text has the number.
        number = re.search(r"\(os error (\d+)\)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error), str(path)) from error


def _flushed(folder: Path, names: list[str]) -> Files:
    """The manifest's entries of these files, after flushing them to disk."""
    for name in names:
        flush(folder / name)
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": checkpoint.sha256(folder / name)} for name in names}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


class Writer:
    """Writes snapshots on a background thread, one at a time; rank 0 prunes after each.

    If a snapshot cannot be written (disk full), logs a warning; older checkpoints are kept and training continues.

    Args:
        team: the ranks that write together, each with a writer of its own; None if this process writes alone.
        written: called on rank 0 with the step of each checkpoint that is on disk.
        gone: whether the folder of the run was deleted or moved away, so that nothing may be written there.
    """

    def __init__(
        self,
        folder: Path,
        settings: Retention,
        team: Team | None = None,
        written: Callable[[int], None] = lambda _: None,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._team = team
        self._written = written
        self._gone = gone
        self._lost = False
        self._saves = 0
        self._took_s = 0.0
        self._thread: threading.Thread | None = None
        self._newest: Path | None = None
        self._failed: str | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Start writing in the background; waits for the previous write first. All ranks of a team must call it."""
        self.wait()
        self._saves += 1
        thread = threading.Thread(target=self._run, args=(snapshot, self._saves), name="checkpoint")
        thread.start()
        self._thread = thread  # only now: it may not start, for lack of threads, and `wait` would fail in its turn

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

    @property
    def lost(self) -> bool:
        """Whether the last snapshot is not on disk because the folder of the run is gone."""
        return self._lost

    @property
    def writing(self) -> bool:
        """Whether a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def took_s(self) -> float:
        """Seconds from the last finished snapshot until it was on disk; 0 before the first."""
        return self._took_s

    def _run(self, snapshot: Snapshot, save: int) -> None:
        begun = time.monotonic()
        follows = self._team is not None and self._team.rank > 0
        (self._write_own if follows else self._write)(snapshot, save)
        self._took_s = time.monotonic() - begun

    def _write(self, snapshot: Snapshot, save: int) -> None:
        team = self._team
        try:
            snapshot.wait()
            self._flush_record()
            if team is None:
                path = write(self._folder, snapshot, allowed=self._refuse_if_gone)
            else:
                path = write(self._folder, snapshot, f"{team.token}-{save}", team.files, self._refuse_if_gone)
            # Older checkpoints are deleted only after that. The hashes are those of what was read back.
            checkpoint.check(path, hashes=False)
        except Exception as error:  # exceptions of this thread reach nobody, and a failed save must be reported
            self._failed, knew = _reason(error), self._lost
            self._lost = self._gone()
            if self._lost and not knew:
                log.warning("the checkpoint of step %d could not be saved (%s); training stops", snapshot.step, self._failed)
            elif not self._lost:
                log.warning(
                    "the checkpoint of step %d could not be saved (%s); training continues, older checkpoints are kept",
                    snapshot.step,
                    self._failed,
                )
            return
        self._failed, self._newest, self._lost = None, path, False
        self._written(snapshot.step)
        try:
            retention.prune(self._folder, snapshot.step, self._settings)
        except OSError as error:
            log.warning("older checkpoints were not deleted (%s); the next save tries again", error)

    def _refuse_if_gone(self) -> None:
        if self._gone():
            raise FileNotFoundError(
                errno.ENOENT, "the folder of the run was deleted or moved away", str(self._folder.parent)
            )

    def _flush_record(self) -> None:
        """After a loss of power, the run continues from its checkpoint: the lines of the steps before it must be there."""
        try:
            run_folder.RunFolder(self._folder.parent).flush()
        except OSError as error:
            if self._gone():  # the save says so
                return
            log.warning("the record of the run may be incomplete after a loss of power: %s", error)

    def _write_own(self, snapshot: Snapshot, save: int) -> None:
        team = self._team
        assert team is not None
        try:
            snapshot.wait()
            report: dict[str, Any] = {"files": write_own(self._folder, snapshot, f"{team.token}-{save}")}
        except Exception as error:  # rank 0 reports it
            report = {"failed": f"{error} (on {socket.gethostname()})"[:_REASON_CHARACTERS]}
        try:
            team.tell(report)
        except RuntimeError as error:
            log.warning("cannot tell rank 0 about the checkpoint of step %d: %s", snapshot.step, error)
