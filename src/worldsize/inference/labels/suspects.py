"""Suspicious images of a dataset: what the file and the page say about each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from worldsize.data.samples import Dataset, EncodedSamples, Samples
from worldsize.inference.labels.ranking import Ranked, proposals
from worldsize.inference.predict.model import Model

_AT_ONCE = 64  # images in memory


@dataclass(frozen=True)
class Suspect:
    """One image, by its ``index`` in its ``split``; class names are ``given``, ``label`` (now used) and ``proposed``.

    ``probability`` (0 to 1) is that of ``proposed``; ``margin`` and ``loss`` are means over the ``visits`` of training.
    Without visits, these three are NaN and nothing is proposed. ``copies`` are the keys of images with the same bytes and
    another label.
    """

    index: int
    image: str
    given: str
    label: str
    proposed: str = ""
    probability: float = math.nan
    margin: float = math.nan
    loss: float = math.nan
    visits: int = 0
    copies: tuple[str, ...] = ()
    split: str = "train"


def find(
    ranked: Ranked, top: int, given: Dataset, used: Dataset, model: Model, copies: dict[int, tuple[str, ...]]
) -> list[Suspect]:
    """The ``top`` most suspicious training images and those with ``copies``, in order of suspicion, and all corrections.

    A label is replaced by the proposed one if training contradicted it on average (a mean margin below 0) and the trained
    network gives the proposed one more than half of the probability. Corrections that the run used are kept, also those of
    validation images, so that the result replaces the run's own file.

    Args:
        given: the dataset with its own labels; ``used``: with those of the run.
        copies: by index in the training split, see `Suspect`.

    Raises:
        DataError: an image cannot be read or decoded any more.
    """
    special = np.union1d(_changed(given.train, used.train), np.array(list(copies), np.int64))
    chosen = np.flatnonzero((np.arange(len(ranked.indices)) < top) | np.isin(ranked.indices, special))
    found = _seen(ranked, chosen, given.train, used.train, model, copies)
    for index in np.setdiff1d(special, ranked.indices).tolist():
        found.append(replace(_unseen(index, "train", given.train, used.train), copies=copies.get(index, ())))
    return found + [_unseen(index, "val", given.val, used.val) for index in _changed(given.val, used.val).tolist()]


def _changed(given: Samples, used: Samples) -> NDArray[np.int64]:
    return np.flatnonzero(given.labels != used.labels)


def _seen(
    ranked: Ranked,
    chosen: NDArray[np.int64],
    given: Samples,
    used: Samples,
    model: Model,
    copies: dict[int, tuple[str, ...]],
) -> list[Suspect]:
    """The images at the places ``chosen`` of the ranking."""
    indices = ranked.indices[chosen]
    labels = used.labels[indices].astype(np.int64)
    best, probability = proposals(_logits(model, used, indices), labels)
    classes, found = used.classes, []
    for i, place in enumerate(chosen.tolist()):
        index = int(indices[i])
        label, proposed = classes[int(labels[i])], classes[int(best[i])]
        wrong = ranked.margin[place] < 0 and probability[i] > 0.5
        found.append(
            Suspect(
                index,
                used.key(index),
                classes[int(given.labels[index])],
                proposed if wrong else label,
                proposed,
                float(probability[i]),
                float(ranked.margin[place]),
                float(ranked.loss[place]),
                int(ranked.visits[place]),
                copies.get(index, ()),
            )
        )
    return found


def _unseen(index: int, split: str, given: Samples, used: Samples) -> Suspect:
    """An image that training has not visited, perhaps because it cannot be decoded."""
    before, label = (samples.classes[int(samples.labels[index])] for samples in (given, used))
    return Suspect(index, used.key(index), before, label, split=split)


def _logits(model: Model, samples: Samples, indices: NDArray[np.int64]) -> torch.Tensor:
    parts = [model.logits(part) for part in _stored(samples, indices)]
    return torch.cat(parts) if parts else torch.empty(0, len(samples.classes))


def _stored(samples: Samples, indices: NDArray[np.int64]) -> Iterator[Sequence[bytes | NDArray[np.uint8]]]:
    """The images, a few at a time."""
    for start in range(0, len(indices), _AT_ONCE):
        part = [int(index) for index in indices[start : start + _AT_ONCE]]
        if isinstance(samples, EncodedSamples):
            stored = [samples.stored(index) for index in part]
            yield [one if isinstance(one, np.ndarray) else bytes(one) for one in stored]
        else:
            yield [np.asarray(samples.image(index)) for index in part]
