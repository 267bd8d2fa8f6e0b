"""Decides when to save, and passes snapshots to the writer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from worldsize import checkpoint, optim
from worldsize.environment import versions
from worldsize.errors import CheckpointError, NotSaved
from worldsize.progress import Progress
from worldsize.recipe import Checkpoint
from worldsize.state import TrainState
from worldsize.world import World


class Saver:
    """Takes snapshots of a run on all ranks; rank 0 writes them in the background.

    Args:
        facts: constants of the run that every checkpoint records (identity, fingerprint, sizes).
    """

    def __init__(
        self, settings: Checkpoint, folder: Path, world: World, state: TrainState, recipe_yaml: str, facts: Mapping[str, Any]
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._world = world
        self._state = state
        self._recipe = recipe_yaml
        self._facts = dict(facts)
        self._writer = checkpoint.Writer(folder, settings)
        self._saved = time.monotonic()

    def due(self) -> bool:
        """Whether the recipe's interval between checkpoints has elapsed."""
        every = self._settings.every_seconds
        return every is not None and time.monotonic() - self._saved >= every

    def save(self, progress: Progress, wait: bool = False) -> None:
        """Save the state after the last step. All ranks must call it at the same step.

        Args:
            wait: return, on all ranks, only after it is on disk.

        Raises:
            NotSaved: with ``wait``, if it could not be written.
        """
        self.write(self.snapshot(progress), wait)

    def snapshot(self, progress: Progress) -> checkpoint.Snapshot | None:
        """A copy of the state after the last step on rank 0, None elsewhere. All ranks must call it at the same step."""
        state = self._state
        with state.consensus(self._world, progress.step):
            weights = checkpoint.copy(state.model.state_dict()) if self._world.is_main else {}
        ranks = state.gather(self._world)
        self._saved = time.monotonic()
        if not self._world.is_main:
            return None
        numbers = {**self._facts, **progress.as_dict(), "world_size": self._world.size, "versions": versions()}
        numbers |= {"scaler": state.scaler.state_dict(), "optimizer": type(state.optimizer).__name__}
        optimizer = checkpoint.copy(optim.state_tensors(state.optimizer, state.model))
        return checkpoint.Snapshot(weights, optimizer, ranks, numbers, self._recipe)

    def write(self, snapshot: checkpoint.Snapshot | None, wait: bool = False) -> None:
        """Write rank 0's snapshot to disk; arguments and errors as in `save`."""
        if snapshot is not None:
            self._writer.save(snapshot)
        if not wait:
            return
        self._writer.wait()
        if failed := self._world.from_main(self._writer.failed):
            raise NotSaved(f"the last state could not be saved ({failed}). Last good checkpoint: {self.newest() or 'none'}")

    def newest(self) -> Path | None:
        """The newest valid checkpoint on rank 0's disk, None if there is none. All ranks must call it."""
        path = None
        if self._world.is_main:
            self._writer.wait()
            with suppress(CheckpointError):
                path = checkpoint.newest_valid(self._folder)
        return self._world.from_main(path)

    def close(self) -> None:
        """Wait for pending writes."""
        self._writer.wait()
