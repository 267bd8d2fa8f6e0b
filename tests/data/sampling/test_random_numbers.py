"""Philox: published test vectors, and the statistics of the draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from worldsize.data.sampling.random_numbers import Use, key_of, philox, seed_of, uniforms

WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**64 - 1)
ONES = 0xFFFFFFFF

# From kat_vectors of Random123 1.14, lines philox4x32 10.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_matches_the_published_test_vectors(counter, key, words):
    assert tuple(philox(counter, key).tolist()) == words


@given(st.lists(WORD, min_size=1, max_size=5), st.lists(WORD, min_size=1, max_size=5), WORD, WORD, st.tuples(WORD, WORD))
def test_broadcast_counters_equal_one_at_a_time(rows, columns, third, fourth, key):
    together = philox((np.array(rows)[:, None], np.array(columns)[None, :], third, fourth), key)
    alone = [[philox((r, c, third, fourth), key) for c in columns] for r in rows]
    assert together.shape == (4, len(rows), len(columns))
    np.testing.assert_array_equal(together, np.moveaxis(np.array(alone), -1, 0))


@given(SEED)
def test_key_holds_all_64_bits_of_the_seed(seed):
    low, high = key_of(seed)
    assert low < 2**32
    assert high < 2**32
    assert high << 32 | low == seed


@given(SEED, st.integers(0, 10**6), st.lists(WORD, min_size=1, max_size=20, unique=True), st.integers(1, 41), st.randoms())
def test_a_samples_draws_do_not_depend_on_its_batch(seed, epoch, samples, count, random):
    shuffled = random.sample(samples, len(samples))
    batch = dict(zip(shuffled, uniforms(seed, Use.AUGMENT, epoch, shuffled, count), strict=True))
    for sample in samples:
        np.testing.assert_array_equal(batch[sample], uniforms(seed, Use.AUGMENT, epoch, [sample], count)[0])


@given(SEED, st.integers(1, 41), st.integers(1, 41))
def test_fewer_draws_are_the_first_of_more(seed, few, many):
    few, many = sorted((few, many))
    np.testing.assert_array_equal(
        uniforms(seed, Use.AUGMENT, 3, [5, 6], few), uniforms(seed, Use.AUGMENT, 3, [5, 6], many)[:, :few]
    )


def test_uniforms_lie_in_the_half_open_unit_interval():
    draws = uniforms(0, Use.AUGMENT, 0, np.arange(100_000), 41)
    assert draws.shape == (100_000, 41)
    assert draws.dtype == np.float64
    assert 0 <= draws.min() < 1e-5
    assert 1 - 1e-5 < draws.max() < 1


def test_the_largest_word_stays_below_one():
    assert ONES * 2.0**-32 < 1


@pytest.mark.parametrize("column", [0, 1, 2, 3, 4, 40])
def test_uniforms_are_uniform_over_samples(column):
    draws = uniforms(1, Use.AUGMENT, 2, np.arange(20_000), 41)[:, column]
    assert stats.kstest(draws, "uniform").pvalue > 0.001


def test_uniforms_are_uniform_over_epochs_and_seeds():
    over_epochs = [uniforms(1, Use.AUGMENT, epoch, [7], 4)[0, 2] for epoch in range(3000)]
    over_seeds = [uniforms(seed, Use.AUGMENT, 0, [7], 4)[0, 2] for seed in range(3000)]
    assert stats.kstest(over_epochs, "uniform").pvalue > 0.001
    assert stats.kstest(over_seeds, "uniform").pvalue > 0.001


def test_two_draws_of_a_sample_are_independent():
    draws = uniforms(3, Use.AUGMENT, 0, np.arange(40_000), 2)
    cells = np.histogram2d(draws[:, 0], draws[:, 1], bins=10, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(cells.ravel()).pvalue > 0.001


def test_neighboring_samples_and_epochs_are_uncorrelated():
    now, later = (uniforms(4, Use.AUGMENT, epoch, np.arange(40_000), 1)[:, 0] for epoch in (0, 1))
    assert abs(np.corrcoef(now[:-1], now[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(now, later)[0, 1]) < 0.02


def test_use_epoch_sample_and_seed_each_give_other_draws():
    base = {"seed": 1, "use": Use.AUGMENT, "epoch": 2, "samples": [3]}
    changes = [
        {},
        {"seed": 2},
        {"seed": 1 + 2**32},
        {"epoch": 3},
        {"samples": [4]},
        *({"use": use} for use in Use if use is not Use.AUGMENT),
    ]
    draws = {tuple(uniforms(**(base | change), count=4)[0]) for change in changes}
    assert len(draws) == len(changes)


@given(SEED, st.sampled_from(Use), st.lists(st.integers(0, 2**40), max_size=4))
def test_seed_of_is_a_63_bit_function_of_its_arguments(seed, use, position):
    value = seed_of(seed, use, *position)
    assert 0 <= value < 2**63
    assert value == seed_of(seed, use, *position)


@given(SEED, st.lists(st.integers(0, 2**40), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 1000))
def test_seed_of_differs_by_every_argument(seed, position, index, shift):
    index %= len(position)
    moved = [p + shift if i == index else p for i, p in enumerate(position)]
    seeds = [
        seed_of(seed, Use.TORCH, *position),
        seed_of(seed, Use.TORCH, *moved),
        seed_of(seed, Use.TORCH, *position[:-1]),
        seed_of(seed, Use.TORCH, *position, 0),
        seed_of((seed + shift) % 2**64, Use.TORCH, *position),
        seed_of(seed, Use.ORDER, *position),
    ]
    assert len(set(seeds)) == len(seeds)


def test_seed_of_does_not_run_positions_together():
    assert seed_of(0, Use.TORCH, 1, 23) != seed_of(0, Use.TORCH, 12, 3)


def test_seed_of_does_not_change_between_versions():
    """Runs of earlier versions must stay reproducible."""
    assert seed_of(0, Use.TORCH, 0) == 1023116025278270157
