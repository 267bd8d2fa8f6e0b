"""Mean average precision and F1 are scikit-learn's, whatever the order of the samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score

from worldsize.training.average_precision import average_precision, mean_average_precision, micro_f1


@st.composite
def scored(draw) -> tuple[np.ndarray, np.ndarray]:
    """Scores with many ties, and targets."""
    n, classes = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = draw(st.sampled_from([1, 2, 5, 1000]))
    targets = random.random((n, classes)) < draw(st.sampled_from([0.05, 0.3, 1.0]))
    return random.integers(-values, values, (n, classes)) / 3, targets


@given(scored())
def test_average_precision_is_scikit_learns(case):
    scores, targets = case
    theirs = [average_precision_score(targets[:, i], scores[:, i]) for i in range(targets.shape[1]) if targets[:, i].any()]
    if not theirs:
        assert mean_average_precision(scores, targets) is None
        return
    assert mean_average_precision(scores, targets) == pytest.approx(np.mean(theirs), rel=1e-12)


@given(scored(), st.integers(0, 2**32))
def test_the_order_of_the_samples_does_not_change_a_bit(case, seed):
    scores, targets = case
    order = np.random.default_rng(seed).permutation(len(scores))
    assert mean_average_precision(scores, targets) == mean_average_precision(scores[order], targets[order])


def test_average_precision_by_hand():
    scores, targets = np.array([0.9, 0.8, 0.8, 0.1]), np.array([True, True, False, True])
    # Thresholds 0.9: 1 of 1; 0.8: 2 of 3; 0.1: 3 of 4.
    assert average_precision(scores, targets) == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)


@given(scored())
def test_f1_is_scikit_learns(case):
    scores, targets = case
    theirs = f1_score(targets, scores > 0, average="micro", zero_division=0) if targets.shape[1] > 1 else None
    if theirs is not None:
        assert micro_f1(scores > 0, targets) == pytest.approx(theirs)


def test_f1_of_nothing():
    assert micro_f1(np.zeros((3, 2), bool), np.zeros((3, 2), bool)) == 0
