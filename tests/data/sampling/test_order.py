"""The order of an epoch is a permutation, and all permutations are equally likely."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from worldsize.data.sampling.order import permute
from worldsize.data.sampling.random_numbers import philox

SEED = st.integers(0, 2**64 - 1)
EPOCH = st.integers(0, 2**32 - 1)


def orders(seed: int, epochs: int, n: int) -> np.ndarray:
    """(epochs, n), computed in parts to limit memory."""
    parts = np.array_split(np.arange(epochs), max(1, epochs * n // 100_000))
    return np.concatenate([permute(seed, part[:, None], np.arange(n)[None, :], n) for part in parts])


@given(SEED, EPOCH, st.integers(1, 3000))
def test_an_epoch_visits_every_sample_once(seed, epoch, n):
    order = permute(seed, epoch, np.arange(n), n)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", range(1, 40))
def test_small_epochs_visit_every_sample_once_for_many_epochs(n):
    np.testing.assert_array_equal(np.sort(orders(5, 50, n), axis=1), np.tile(np.arange(n), (50, 1)))


def test_an_epoch_of_imagenet_visits_every_image_once():
    n = 1_281_167
    seen = np.zeros(n, np.int64)
    for start in range(0, n, 50_000):
        np.add.at(seen, permute(0, 0, np.arange(start, min(start + 50_000, n)), n), 1)
    assert (seen == 1).all()


def test_the_largest_n_stays_in_range():
    n = 2**32 - 1
    order = permute(2**64 - 1, 0, np.array([0, 1, n // 2, n - 1]), n)
    assert len(set(order.tolist())) == 4
    assert order.min() >= 0
    assert order.max() < n


@pytest.mark.parametrize(("n", "epochs"), [(4, 24 * 400), (5, 120 * 80), (7, 5040 * 10)])
def test_all_permutations_are_equally_likely_over_the_epochs(n, epochs):
    codes = orders(11, epochs, n) @ n ** np.arange(n)
    possible = [int(np.array(p) @ n ** np.arange(n)) for p in itertools.permutations(range(n))]
    found, counts = np.unique(codes, return_counts=True)
    assert set(found.tolist()) <= set(possible)
    counts = np.concatenate([counts, np.zeros(len(possible) - len(found))])
    assert stats.chisquare(counts).pvalue > 1e-4


def test_all_permutations_are_equally_likely_over_the_seeds():
    codes = [int(permute(seed, 0, np.arange(4), 4) @ 4 ** np.arange(4)) for seed in range(24 * 50)]
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


def test_every_sample_is_equally_likely_at_every_position():
    n, epochs = 100, 2000
    cells = np.zeros((n, n))
    np.add.at(cells, (np.arange(n), orders(12, epochs, n)), 1)
    expected = epochs / n
    statistic = ((cells - expected) ** 2 / expected).sum()
    assert 1e-4 < stats.chi2.sf(statistic, (n - 1) ** 2) < 1 - 1e-4


def test_neighbors_of_one_epoch_are_not_neighbors_in_the_next():
    n = 5000
    first, second = (permute(0, epoch, np.arange(n), n) for epoch in (0, 1))
    assert np.mean(np.diff(first) == 1) < 0.005
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert np.mean(first == second) < 0.005


def test_each_epoch_leaves_out_another_remainder():
    n, batch = 1000, 64
    left_out = {frozenset(permute(0, epoch, np.arange(n - n % batch, n), n).tolist()) for epoch in range(20)}
    assert len(left_out) == 20


def test_seed_epoch_and_n_each_give_another_order():
    orders_seen = {
        tuple(permute(seed, epoch, np.arange(50), n)) for seed in (0, 1, 2**32, 2**63) for epoch in (0, 1) for n in (50, 51)
    }
    assert len(orders_seen) == 16


@given(SEED, EPOCH, st.integers(1, 300), st.data())
def test_any_part_of_an_order_equals_that_part_of_the_complete(seed, epoch, n, data):
    complete = permute(seed, epoch, np.arange(n), n)
    chosen = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    np.testing.assert_array_equal(permute(seed, epoch, np.array(chosen, np.int64), n), complete[chosen])


def test_epochs_and_positions_broadcast():
    table = permute(9, np.arange(6)[:, None], np.arange(30)[None, :], 30)
    assert table.shape == (6, 30)
    for epoch in range(6):
        np.testing.assert_array_equal(table[epoch], permute(9, epoch, np.arange(30), 30))


def test_parts_of_an_epoch_have_orders_of_their_own(monkeypatch):
    table = permute(9, 3, np.arange(50)[None, :], 50, np.arange(4)[:, None])
    assert len({tuple(row) for row in table}) == 4
    np.testing.assert_array_equal(table[0], permute(9, 3, np.arange(50), 50))
    np.testing.assert_array_equal(table[3], permute(9, 3, np.arange(50), 50, 3))
    drawn = []
    monkeypatch.setattr(
        "worldsize.data.sampling.order.philox", lambda counter, key: drawn.append(counter[0]) or philox(counter, key)
    )
    permute(9, 3, np.arange(50), 50, np.arange(50))
    assert len(np.unique(drawn[0])) == drawn[0].size == 24 * 50  # no key twice


def test_a_single_position_equals_its_place_in_the_complete():
    for n in (1, 2, 7, 10, 99):
        complete = permute(1, 3, np.arange(n), n)
        for k in range(n):
            assert permute(1, 3, k, n).shape == ()
            assert int(permute(1, 3, k, n)) == complete[k]


@pytest.mark.parametrize("n", [0, -1, 2**32])
def test_n_out_of_range_is_refused(n):
    with pytest.raises(ValueError, match="n must be between"):
        permute(0, 0, np.arange(1), n)
