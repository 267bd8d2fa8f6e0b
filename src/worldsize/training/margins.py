"""The loss and the margin of each training sample, summed over the run: wrong labels have low margins.

The mean margin is the area under the margin of Pleiss et al. 2020 (arXiv 2001.10528). `worldsize labels` ranks by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worldsize.checkpoint import Tensors
from worldsize.distributed.world import World

# Sums of integers do not depend on the order of addition: not on ranks, interruptions or repeated samples.
SCALE = 1024  # units of one
_LIMIT = 1024.0  # of the absolute value of one loss or margin; 2,047 visits cannot overflow sums of 32 bits
_NARROW = {"loss": np.int32, "margin": np.int32, "visits": np.int16}
_WIDE = {"loss": np.int64, "margin": np.int64, "visits": np.int32}
_MIXED = -1  # instead of the index of a sample whose image was mixed with another one


@dataclass(frozen=True)
class Answers:
    """The samples of a forward pass: their ``indices``, int64 (n,), and what `Objective.values` returned for them.

    ``mixed``: each image was mixed with another one.
    """

    indices: NDArray[np.int64]
    values: torch.Tensor
    mixed: bool


class Margins:
    """Sums over the visits of the ``samples`` of a training split; rank 0 has those of all ranks.

    ``wide``: an epoch may visit a sample more than once, so the sums are of 64 bits.
    """

    def __init__(self, samples: int, wide: bool = False) -> None:
        self._samples = samples
        self._types: dict[str, type[np.signedinteger]] = _WIDE if wide else _NARROW
        self._pending: list[Answers] = []
        self._sums = self._zeros()

    def add(self, answers: Iterable[Answers]) -> None:
        """Record one step of this rank. Nothing waits for the device."""
        self._pending += answers

    def merge(self, world: World) -> None:
        """Add what the ranks recorded since the last call. All of them must call it after the same step."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        notes = world.to_main(_packed(pending))
        if notes is not None:
            _add(self._sums, notes.reshape(-1, 3).numpy())

    def tensors(self) -> Tensors:
        """Copies of ``loss`` and ``margin`` (n,), in units of 1 / `SCALE`, and of ``visits`` (n,): signed integers."""
        return {name: torch.from_numpy(values.copy()) for name, values in self._sums.items()}

    def load(self, tensors: Tensors) -> None:
        """Continue from `tensors`; from zero if there are none, or if they are of another dataset."""
        self._sums = self._zeros()
        if tensors and len(tensors["visits"]) == self._samples:
            self._sums = {name: tensors[name].numpy().astype(dtype) for name, dtype in self._types.items()}

    def _zeros(self) -> dict[str, NDArray[np.signedinteger]]:
        return {name: np.zeros(self._samples, dtype) for name, dtype in self._types.items()}


def _packed(pending: list[Answers]) -> torch.Tensor:
    """The index, the loss and the margin of each sample, int32 (n, 3); of as many on every rank."""
    indices = np.concatenate([np.full_like(one.indices, _MIXED) if one.mixed else one.indices for one in pending])
    # A slice: a list of columns would be copied to the device, and the host would wait for that.
    values = torch.cat([one.values for one in pending])[:, ::2].nan_to_num().clamp(-_LIMIT, _LIMIT)
    fixed = (values * SCALE).round().to(torch.int32).cpu()
    return torch.cat([torch.from_numpy(indices.astype(np.int32))[:, None], fixed], dim=1)


def _add(sums: dict[str, NDArray[np.signedinteger]], notes: NDArray[np.int32]) -> None:
    notes = notes[notes[:, 0] != _MIXED]
    for name, values in zip(sums, (notes[:, 1], notes[:, 2], np.int16(1)), strict=True):
        np.add.at(sums[name], notes[:, 0], values)
