"""The logits of an evaluation, one row per image."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from worldsize.data.loading.loader import Batch
from worldsize.distributed.world import World
from worldsize.inference.details.measures import Floats, Ints


@dataclass(frozen=True)
class Answers:
    """Logits of n images, in the order of the split: ``indices`` (n,) are their numbers in it, ``logits`` are float64
    (n, classes)."""

    indices: Ints
    labels: Ints
    logits: Floats

    @property
    def predictions(self) -> Ints:
        return self.logits.argmax(1)

    @property
    def right(self) -> NDArray[np.bool_]:
        return self.predictions == self.labels


@dataclass
class Collector:
    """Keeps the logits of this rank's batches until `answers`."""

    _parts: list[tuple[Ints, Ints, NDArray[np.float32]]] = field(default_factory=list)

    def add(self, batch: Batch, logits: torch.Tensor) -> None:
        """A batch that was evaluated."""
        self._parts.append((batch.indices.copy(), batch.labels.cpu().numpy().copy(), logits.float().cpu().numpy()))

    def answers(self, world: World) -> Answers | None:
        """Those of all ranks, on rank 0; None elsewhere. A collective: every rank must call it."""
        gathered = world.gather_on_main(self._parts)
        if gathered is None:
            return None
        parts = [part for rank in gathered for part in rank]
        indices, labels, logits = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        order = np.argsort(indices)
        return Answers(indices[order], labels[order], logits[order].astype(np.float64))
