"""Metrics of images with several labels: functions of all scores of a split, exact and independent of their order."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Targets = NDArray[np.bool_]


def average_precision(scores: Scores, targets: Targets) -> float:
    """Area under the precision-recall curve of one class, as scikit-learn's ``average_precision_score``.

    The sum over thresholds of the precision, weighted by the increase of the recall, without interpolation. Samples with
    equal scores are above the same thresholds, so their order does not matter.

    Args:
        scores: float64 (n,).
        targets: bool (n,), at least one is True.

    Returns:
        0 to 1.
    """
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # of each group of equal scores
    hits = np.cumsum(targets[order])[last]
    # An exact sum: its bits depend neither on the machine nor on the number of threads.
    return math.fsum(np.diff(hits, prepend=0) * hits / (last + 1)) / int(hits[-1])


def mean_average_precision(scores: Scores, targets: Targets) -> float | None:
    """The mean of `average_precision` over the classes that have a sample; None if there is none.

    Args:
        scores: float64 (n, classes).
        targets: bool (n, classes).
    """
    found = [average_precision(scores[:, i], targets[:, i]) for i in np.flatnonzero(targets.any(0))]
    return math.fsum(found) / len(found) if found else None


def micro_f1(predicted: Targets, targets: Targets) -> float:
    """The F1 score over all pairs of a sample and a class: the harmonic mean of precision and recall.

    Args:
        predicted: bool (n, classes).
        targets: bool (n, classes).

    Returns:
        0 to 1; 0 if nothing is predicted and nothing is true, as in scikit-learn.
    """
    total = int(predicted.sum()) + int(targets.sum())
    return 2 * int((predicted & targets).sum()) / total if total else 0.0
