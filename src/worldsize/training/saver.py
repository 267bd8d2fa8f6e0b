"""Decides when to save, and passes snapshots to the writer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from worldsize import checkpoint
from worldsize.checkpoint import writer
from worldsize.config import job_pod
from worldsize.config.recipe import Checkpoint
from worldsize.distributed.world import World
from worldsize.errors import CheckpointError, NotSaved
from worldsize.optim import optimizers
from worldsize.training.early_signs import EarlySigns
from worldsize.training.environment import versions
from worldsize.training.progress import Progress
from worldsize.training.state import TrainState


class Saver:
    """Takes snapshots of a run on all ranks, which write them in the background.

    Args:
        facts: constants of the run that every checkpoint records (identity, fingerprint, sizes).
        written: called on rank 0 with the step of each checkpoint that is on disk.
        gone: whether the folder of the run was deleted or moved away; of rank 0.
    """

    def __init__(
        self,
        settings: Checkpoint,
        folder: Path,
        world: World,
        state: TrainState,
        recipe_yaml: str,
        facts: Mapping[str, Any],
        written: Callable[[int], None] = lambda _: None,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._world = world
        self._state = state
        self._recipe = recipe_yaml
        self._facts = {**facts, "versions": versions()}
        self._team = writer.team(world, folder)
        self._writer = writer.Writer(folder, settings, self._team, written, gone)
        self._memory: checkpoint.Tensors = {}
        self._copying = checkpoint.Copying()
        # One process looks at what those of a machine share.
        self._signs = EarlySigns(folder if world.is_main else None) if world.rank_info.local_rank == 0 else None
        self._saved = time.monotonic()

    @property
    def lost(self) -> bool:
        """Whether this rank could not save because the folder of the run is gone: there is no use in training on."""
        return self._writer.lost

    def prepare(self) -> None:
        """Allocate the memory of most of a snapshot, which the first one would wait for."""
        copying = checkpoint.Copying(self._memory)
        if self._world.is_main:
            self._weights(copying)
            copying.copy(self._optimizer(), "optimizer")
        copying.wait()

    def due(self) -> bool:
        """Whether this rank asks for a checkpoint: rank 0 when the recipe's interval has elapsed, any at `EarlySigns`.

        Never while one is being written. The interval ends early by the time that writing takes: what is on disk is then
        no older than the interval.
        """
        if self._writer.writing:
            return False
        if self._signs is not None and self._signs.begun(sum(tensor.nbytes for tensor in self._memory.values())):
            return True
        every = self._settings.every_seconds
        if every is None or not self._world.is_main:
            return False
        return time.monotonic() - self._saved >= every - min(self._writer.took_s, every / 2)

    def save(self, progress: Progress, wait: bool = False) -> None:
        """Save the state after the last step. All ranks must call it at the same step.

        Args:
            wait: return, on all ranks, only after it is on disk.

        Raises:
            NotSaved: with ``wait``, if it could not be written.
        """
        self._writer.wait()  # it reads the memory that the snapshot fills
        self._copying = checkpoint.Copying(self._memory)
        later = self._state.strategy.stable_between_updates and self._state.averaging is None
        self.write(self.snapshot(progress, self._copying, later), wait)

    def settle(self) -> None:
        """Before the weights or the optimizer's state change: complete a snapshot that is being copied in the background."""
        self._copying.settle()

    def snapshot(
        self, progress: Progress, copying: checkpoint.Copying | None = None, later: bool = False
    ) -> checkpoint.Snapshot | None:
        """A copy of what this rank writes of the state after the last step; None if rank 0 writes for it.

        All ranks must call it at the same step.

        Args:
            copying: has the memory of an earlier snapshot, which nobody reads any more.
            later: what is large is copied after this returns, see `settle`.
        """
        copying = copying or checkpoint.Copying()
        state = self._state
        with state.consensus(self._world, progress.step):
            weights = self._weights(copying, later) if self._world.is_main else {}
            average = self._average(copying)
        samples = self._samples()
        ranks = state.gather(self._world) if self._team is None else {self._world.rank: copying.copy(state.own(), "own")}
        self._saved = time.monotonic()
        if not self._world.is_main:
            if self._team is None:
                return None
            return checkpoint.Snapshot({}, {}, ranks, {"step": progress.step}, "", copying.wait)
        numbers = {**self._facts, **progress.as_dict(), "world_size": self._world.size}
        numbers |= {"scaler": state.scaler.state_dict(), "optimizer": type(state.optimizer).__name__}
        optimizer = copying.copy(self._optimizer(), "optimizer", later)
        return checkpoint.Snapshot(weights, optimizer, ranks, numbers, self._recipe, copying.wait, average, samples)

    def _weights(self, copying: checkpoint.Copying, later: bool = False) -> checkpoint.Tensors:
        """Copies of the network's tensors. Its buffers change in a forward pass, so they are copied at once."""
        tensors = self._state.model.state_dict()
        trained = {name: tensors[name] for name, _ in self._state.model.named_parameters() if name in tensors}
        buffers = {name: tensor for name, tensor in tensors.items() if name not in trained}
        return copying.copy(trained, "model", later, into=copying.copy(buffers, "buffers"))

    def _optimizer(self) -> checkpoint.Tensors:
        return optimizers.state_tensors(self._state.optimizer, self._state.model)

    def _samples(self) -> checkpoint.Tensors:
        """What the ranks noted about the samples, on rank 0; empty elsewhere and if nothing is noted."""
        margins = self._state.margins
        if margins is None:
            return {}
        margins.merge(self._world)
        return margins.tensors() if self._world.is_main else {}

    def _average(self, copying: checkpoint.Copying) -> checkpoint.Tensors:
        """The averaged weights on rank 0, empty elsewhere and without averaging."""
        if self._state.averaging is None:
            return {}
        with self._state.averaged(self._world):
            return copying.copy(self._state.model.state_dict(), "average") if self._world.is_main else {}

    def write(self, snapshot: checkpoint.Snapshot | None, wait: bool = False) -> None:
        """Write this rank's snapshot to disk; arguments and errors as in `save`."""
        if snapshot is not None:
            self._writer.save(snapshot)
        if not wait:
            return
        self._writer.wait()
        failed, lost = self._world.from_main((self._writer.failed, self._writer.lost))
        if lost:
            raise NotSaved(
                f"{self._folder.parent} was deleted or moved away while its run trained: the last state could not be saved. "
                "If it was moved, or its volume unmounted, undo that and continue the run: "
                f"{job_pod.continuing(self._folder.parent)}. If it was deleted, start a new run"
            )
        if failed:
            raise NotSaved(
                f"the last state could not be saved ({failed}). Last good checkpoint: {self.newest() or 'none'}. Once that "
                f"can be written, continue the run: {job_pod.continuing(self._folder.parent)}"
            )

    def newest(self, finite: bool = False) -> Path | None:
        """The newest valid checkpoint on rank 0's disk, None if there is none. All ranks must call it.

        Args:
            finite: the newest whose weights are all finite.
        """
        path = None
        if self._world.is_main:
            self._writer.wait()
            find = checkpoint.newest_finite if finite else checkpoint.newest_valid
            with suppress(CheckpointError):
                path = find(self._folder, self._world.rank)
        return self._world.from_main(path)

    def close(self) -> None:
        """Wait for pending writes."""
        self._writer.wait()
