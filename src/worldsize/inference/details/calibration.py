"""Whether probabilities mean what they say (pure): Guo et al. 2017, "On calibration of modern neural networks"."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worldsize.inference.details.measures import Floats, Ints, softmax

BINS = 15  # as in the paper


@dataclass(frozen=True)
class Bin:
    """Images whose highest probability is in (``low``, ``high``]: its mean, and the share of right predictions."""

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


def reliability(probabilities: Floats, labels: Ints) -> list[Bin]:
    """The bins that have images, by the highest probability."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    edges = np.linspace(0, 1, BINS + 1)
    places = np.clip(np.digitize(confidence, edges, right=True) - 1, 0, BINS - 1)
    found = []
    for i in range(BINS):
        inside = places == i
        if inside.any():
            means = float(confidence[inside].mean()), float(right[inside].mean())
            found.append(Bin(float(edges[i]), float(edges[i + 1]), int(inside.sum()), *means))
    return found


def error(bins: list[Bin]) -> float:
    """The expected calibration error: the mean of |accuracy - confidence| over images, 0 to 1."""
    return sum(b.images * abs(b.accuracy - b.confidence) for b in bins) / sum(b.images for b in bins)


def loss(logits: Floats, labels: Ints, temperature: float) -> float:
    """Mean cross-entropy of the logits divided by the temperature."""
    scaled = logits / temperature
    highest = scaled.max(1)
    total = np.log(np.exp(scaled - highest[:, None]).sum(1)) + highest
    return float((total - scaled[np.arange(len(labels)), labels]).mean())


LOWEST, HIGHEST = 0.05, 20.0  # temperatures


def temperature(logits: Floats, labels: Ints) -> float:
    """The temperature, `LOWEST` to `HIGHEST`, by which to divide the logits for the smallest cross-entropy.

    The loss is convex in 1 / temperature; golden section search over its logarithm finds the minimum to 1e-6.
    """
    low, high = np.log(LOWEST), np.log(HIGHEST)
    ratio = (np.sqrt(5) - 1) / 2
    while high - low > 1e-6:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if loss(logits, labels, float(np.exp(a))) < loss(logits, labels, float(np.exp(b))):
            high = b
        else:
            low = a
    return float(np.exp((low + high) / 2))


def doubt(found: float, wrong: int) -> str | None:
    """Why the temperature ``found`` should not be used; None without a reason."""
    if not wrong:
        return "The temperature cannot be fitted: no prediction is wrong, so the smallest loss is at certainty."
    if not LOWEST * 1.001 < found < HIGHEST / 1.001:
        return f"The temperature is not fitted: the smallest loss is beyond the range {LOWEST:g} to {HIGHEST:g}."
    return None


def calibrated(logits: Floats, labels: Ints) -> tuple[float, float, float]:
    """(temperature, calibration error without it, with it)."""
    best = temperature(logits, labels)
    before, after = (error(reliability(softmax(logits, t), labels)) for t in (1.0, best))
    return best, before, after
