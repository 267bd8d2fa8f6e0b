"""The order of suspicion: samples with the lowest mean margin come first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worldsize.checkpoint import Tensors
from worldsize.training.margins import SCALE


@dataclass(frozen=True)
class Ranked:
    """All samples with at least one visit, the most suspicious first.

    ``indices``: int64 (m,); ``margin`` and ``loss``: their means over the visits, float64 (m,); ``visits``: int64 (m,).
    """

    indices: NDArray[np.int64]
    margin: NDArray[np.float64]
    loss: NDArray[np.float64]
    visits: NDArray[np.int64]


def ranked(sums: Tensors) -> Ranked:
    """Rank the samples of `margins.Margins.tensors`; equal margins by the larger loss, then by index."""
    loss, margin, visits = (sums[name].numpy().astype(np.int64) for name in ("loss", "margin", "visits"))
    seen = np.flatnonzero(visits)
    means = {name: values[seen] / (visits[seen] * SCALE) for name, values in (("margin", margin), ("loss", loss))}
    order = np.lexsort((seen, -means["loss"], means["margin"]))
    return Ranked(seen[order], means["margin"][order], means["loss"][order], visits[seen][order])


def proposals(logits: torch.Tensor, given: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each image, the most probable class other than its given one, and that class's probability.

    Args:
        logits: (n, classes).
        given: int64 (n,), the given class.
    """
    probabilities = logits.double().softmax(1)
    others = probabilities.scatter(1, torch.from_numpy(given)[:, None], -1)
    best = others.max(1)
    return best.indices.numpy(), best.values.numpy()
