"""Measures of a classifier on a set of images (pure).

``labels`` int64 (n,) and ``predictions`` int64 (n,) are class numbers; ``probabilities`` float64 (n, classes) has rows that
sum to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_RESAMPLES = 10_000


@dataclass(frozen=True)
class OfClass:
    """``precision``: of the images predicted as the class, the share that is of it. ``recall``: of its images, the share
    that was found. ``f1``: their harmonic mean. All 0 to 1, and 0 where there is nothing to divide by. ``support``: the
    number of its images."""

    precision: float
    recall: float
    f1: float
    support: int


def softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    """Probabilities (n, classes) of logits (n, classes) divided by the temperature."""
    scaled = logits / temperature
    powers = np.exp(scaled - scaled.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def confusion(labels: Ints, predictions: Ints, classes: int) -> Ints:
    """How many images of each class (row) were predicted as each class (column), (classes, classes)."""
    return np.bincount(labels * classes + predictions, minlength=classes**2).reshape(classes, classes)


def of_classes(matrix: Ints) -> list[OfClass]:
    """The measures of each class, from the `confusion` matrix."""
    found = []
    for i in range(len(matrix)):
        right, predicted, support = int(matrix[i, i]), int(matrix[:, i].sum()), int(matrix[i].sum())
        precision, recall = right / max(predicted, 1), right / max(support, 1)
        found.append(OfClass(precision, recall, 2 * right / max(predicted + support, 1), support))
    return found


def confused(matrix: Ints, most: int) -> list[tuple[int, int, int]]:
    """The pairs (label, prediction, images) that are confused most often, at most ``most`` of them."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = (divmod(int(place), len(matrix)) for place in order)
    return [(a, b, int(wrong[a, b])) for a, b in pairs if wrong[a, b] > 0]


def top_k(logits: Floats, labels: Ints, most: int) -> list[float]:
    """The share of images whose label is among the k highest logits, for k = 1 to ``most``.

    Of equal logits, that of the class with the smaller number counts as higher, as in argmax.
    """
    own = logits[np.arange(len(labels)), labels][:, None]
    before = np.arange(logits.shape[1]) < labels[:, None]
    ranks = ((logits > own) | ((logits == own) & before)).sum(1)
    return [float((ranks < k).mean()) for k in range(1, min(most, logits.shape[1]) + 1)]


def interval(right: int, count: int) -> tuple[float, float]:
    """The 95 % bootstrap interval of an accuracy: the 2.5th and 97.5th percentile over resampled sets of images.

    A resampled set has a binomially distributed number of right answers (Efron 1979, "Bootstrap methods"), so the images
    themselves need not be drawn. The same numbers give the same interval.
    """
    drawn = np.random.default_rng(0).binomial(count, right / count, _RESAMPLES) / count
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def by_size(sizes: Ints, right: NDArray[np.bool_], bins: int = 6) -> list[tuple[int, int, int, float]]:
    """Accuracy over image size: (smallest, largest, images, accuracy) of groups with about as many images each.

    Args:
        sizes: shorter side of each image, pixels, (n,); 0 if unknown.
    """
    sizes, right = sizes[sizes > 0], right[sizes > 0]
    if not len(sizes):
        return []
    edges = np.unique(np.quantile(sizes, np.linspace(0, 1, bins + 1)[1:-1], method="higher"))
    group = np.digitize(sizes, edges)
    members = [group == number for number in np.unique(group)]
    return [(int(sizes[m].min()), int(sizes[m].max()), int(m.sum()), float(right[m].mean())) for m in members]
