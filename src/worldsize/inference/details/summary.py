"""Everything that ``worldsize eval --details`` reports about a network, as numbers (pure)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from worldsize.inference.details import calibration, measures
from worldsize.inference.details.calibration import Bin
from worldsize.inference.details.collected import Answers
from worldsize.inference.details.comparison import Comparison, mcnemar
from worldsize.inference.details.measures import Floats, Ints, OfClass

_MOST_PAIRS = 20
_MOST_K = 10


@dataclass(frozen=True)
class Details:
    """See `measures` and `calibration`.

    Attributes:
        interval: that of ``top1``.
        error: the expected calibration error; ``error_scaled``: with the ``temperature``.
        doubt: why the temperature should not be used; None without a reason.
        label_probability: the probability of each image's label, (n,).
    """

    top1: float
    interval: tuple[float, float]
    loss: float
    of_classes: list[OfClass]
    confusion: Ints
    pairs: list[tuple[int, int, int]]
    top_k: list[float]
    bins: list[Bin]
    error: float
    temperature: float
    doubt: str | None
    error_scaled: float
    by_size: list[tuple[int, int, int, float]]
    label_probability: Floats
    confidence: Floats

    def as_json(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """The numbers with the names of classes, without those of single images."""
        named = [{"class": name, **asdict(one)} for name, one in zip(classes, self.of_classes, strict=True)]
        pairs = [{"label": classes[a], "prediction": classes[b], "images": n} for a, b, n in self.pairs]
        return {
            "images": int(self.confusion.sum()),
            "top1": self.top1,
            "top1_interval_95": self.interval,
            "loss": self.loss,
            "top_k": self.top_k,
            "calibration_error": self.error,
            "temperature": self.temperature,
            "temperature_warning": self.doubt,
            "calibration_error_with_temperature": self.error_scaled if self.doubt is None else None,
            "reliability": [asdict(one) for one in self.bins],
            "by_shorter_side": [dict(zip(("from", "to", "images", "top1"), one, strict=True)) for one in self.by_size],
            "classes": named,
            "confused": pairs,
        }


def of(answers: Answers, classes: int, sizes: Ints) -> Details:
    """The details of a network's answers; ``sizes`` (n,) are the images' shorter sides, pixels, 0 if unknown."""
    labels, predictions = answers.labels, answers.predictions
    probabilities = measures.softmax(answers.logits)
    matrix = measures.confusion(labels, predictions, classes)
    right, count = int(answers.right.sum()), len(labels)
    best, before, after = calibration.calibrated(answers.logits, labels)
    return Details(
        top1=right / count,
        interval=measures.interval(right, count),
        loss=calibration.loss(answers.logits, labels, 1.0),
        of_classes=measures.of_classes(matrix),
        confusion=matrix,
        pairs=measures.confused(matrix, _MOST_PAIRS),
        top_k=measures.top_k(answers.logits, labels, _MOST_K),
        bins=calibration.reliability(probabilities, labels),
        error=before,
        temperature=best,
        doubt=calibration.doubt(best, count - right),
        error_scaled=after,
        by_size=measures.by_size(sizes, answers.right),
        label_probability=probabilities[np.arange(count), labels],
        confidence=probabilities.max(1),
    )


@dataclass(frozen=True)
class Other:
    """Another network on the images of an evaluation.

    Attributes:
        name: what --against names.
        top1: its accuracy, 0 to 1.
        counts: which of the images that both could decode they get right.
        predictions: its classes, int64 (n,), one per image of the evaluation; -1 where it could not decode the image.
        label_probability: of each image's label, float64 (n,); NaN where it could not decode the image.
    """

    name: str
    top1: float
    counts: Comparison
    predictions: Ints
    label_probability: Floats

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "top1": self.top1, **asdict(self.counts)}


def compared(name: str, first: Answers, second: Answers) -> Other:
    """The network ``name`` with the answers ``second``, on the images of ``first``."""
    _, here, there = np.intersect1d(first.indices, second.indices, return_indices=True)
    predictions, probability = np.full(len(first.indices), -1), np.full(len(first.indices), np.nan)
    predictions[here] = second.predictions[there]
    probability[here] = measures.softmax(second.logits[there])[np.arange(len(there)), second.labels[there]]
    counts = mcnemar(first.right[here], second.right[there])
    return Other(name, float(second.right.mean()), counts, predictions, probability)
