"""Weighted sampling: shares are exact up to rounding, images take turns, and ranks and interruptions change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldsize.config import recipe_files
from worldsize.config.recipe import Augment, Data, Recipe
from worldsize.data.loading import build
from worldsize.data.samples import ArraySamples
from worldsize.data.sampling.weighted import WeightedShuffle
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import UserError

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 600)


@st.composite
def orders(draw):
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
    weights = draw(st.lists(st.floats(0.01, 20), min_size=len(sizes), max_size=len(sizes)))
    labels = draw(st.permutations(np.repeat(np.arange(len(sizes)), sizes)))
    draws = draw(st.integers(1, 300))
    return WeightedShuffle(draw(SEEDS), np.array(labels), np.array(weights) * sizes, draws)


def epochs(order: WeightedShuffle, first: int, count: int) -> np.ndarray:
    """(count, draws)"""
    return np.array([order(epoch, np.arange(order.draws)) for epoch in range(first, first + count)])


@given(orders(), EPOCHS)
def test_a_class_appears_as_its_share_says_rounded_up_or_down(order, epoch):
    (drawn,) = epochs(order, epoch, 1)
    counts = np.bincount(order.labels[drawn], minlength=len(order.shares))
    assert np.abs(counts - order.draws * order.shares / order.shares.sum()).max() < 1 + 1e-9
    assert (counts[order.shares == 0] == 0).all()


@given(orders(), st.integers(0, 20), st.integers(1, 5))
def test_images_of_a_class_appear_equally_often_over_any_epochs(order, first, count):
    appearances = np.bincount(epochs(order, first, count).reshape(-1), minlength=len(order.labels))
    for label in np.unique(order.labels):
        assert np.ptp(appearances[order.labels == label]) <= 1


@given(orders(), EPOCHS)
def test_the_appearances_of_an_image_have_numbers_of_their_own(order, epoch):
    positions = np.arange(order.draws)
    drawn, numbers = order(epoch, positions), order.appearances(epoch, positions)
    assert len(set(zip(drawn.tolist(), numbers.tolist(), strict=True))) == order.draws
    assert numbers.max() <= np.bincount(drawn).max()


@given(orders(), EPOCHS, st.data())
def test_any_part_of_an_order_equals_that_part_of_the_whole(order, epoch, data):
    chosen = np.array(data.draw(st.lists(st.integers(0, order.draws - 1), min_size=1, max_size=20)))
    np.testing.assert_array_equal(order(epoch, chosen), epochs(order, epoch, 1)[0][chosen])


@given(SEEDS, EPOCHS, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_equal_weights_visit_every_image_once(seed, epoch, sizes):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    order = WeightedShuffle(seed, labels, np.array(sizes, np.float64), len(labels))
    np.testing.assert_array_equal(np.sort(epochs(order, epoch, 1)[0]), np.arange(len(labels)))


def test_over_the_epochs_a_class_has_exactly_its_share():
    order = WeightedShuffle(3, np.repeat(np.arange(3), [30, 8, 2]), np.array([0.3, 9.0, 90.7]), 40)
    means = np.bincount(order.labels[epochs(order, 0, 2000)].reshape(-1)) / 2000
    np.testing.assert_allclose(means, 40 * order.shares / 100, atol=0.05)  # 4.5 standard errors


def test_classes_and_neighbors_are_mixed():
    order = WeightedShuffle(1, np.repeat(np.arange(2), 500), np.ones(2), 500)
    first, second = epochs(order, 0, 2)
    assert 0.4 < np.mean(order.labels[first[:100]]) < 0.6
    assert np.mean(np.diff(np.sort(first)) == 1) < 0.65  # of half of the images: 0.5 in random order, 1 in their own
    assert not set(first) & set(second)  # the other half


ALONE = World(RankInfo("none", 0, 1, 0, 1), torch.device("cpu"), None, 1)


def samples(sizes: tuple[int, ...]) -> ArraySamples:
    labels = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    noise = np.random.default_rng(0).integers(0, 256, (len(labels), 24, 24, 3), np.uint8)
    return ArraySamples("noise", noise, labels, tuple("abcdef"[: len(sizes)]))


def recipe(repeats: int = 1, **data) -> Recipe:
    crops = Data(train_crop_size=16, **({"sampling": "balanced"} | data))
    return Recipe(global_batch=8, micro_batch=2, data=crops, augment=Augment(repeats=repeats))


def visited(plan: BatchPlan, settings: Recipe, epoch: int, first_step: int = 0) -> dict[tuple[int, int], tuple]:
    """The samples and pixels of each micro-batch by (step, place in the step), of all ranks of the plan."""
    found = {}
    for rank in range(plan.world_size):
        loader = build.train_loader(settings, samples((40, 4, 1)), plan, ALONE)
        for i, batch in enumerate(loader.training(plan, rank, epoch, first_step)):
            step, place = divmod(i, plan.accumulation)
            found[first_step + step, rank * plan.accumulation + place] = (batch.indices.tolist(), batch.pixels.tolist())
        loader.close()
    return found


@pytest.mark.parametrize("repeats", [1, 2])
def test_ranks_and_interruptions_change_no_image(repeats):
    whole = visited(BatchPlan(8, 2, 1), recipe(repeats), 3)
    assert len(whole) == 5 * 4
    for size in (2, 4):
        assert visited(BatchPlan(8, 2, size), recipe(repeats), 3) == whole
    rest = visited(BatchPlan(8, 2, 2), recipe(repeats), 3, first_step=2)
    assert rest == {place: images for place, images in whole.items() if place[0] >= 2}


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_each_appearance_of_an_image_is_cropped_differently(repeats):
    batches = visited(BatchPlan(8, 2, 1), recipe(repeats), 0).values()
    crops = [str(image) for indices, pixels in batches for i, image in zip(indices, pixels, strict=True) if i == 44]
    assert len(crops) >= 12  # about a third of 40 are of the one image of its class
    assert len(set(crops)) == len(crops)


def test_the_classes_of_an_epoch_are_balanced():
    indices = [i for indices, _ in visited(BatchPlan(8, 2, 1), recipe(), 0).values() for i in indices]
    counts = np.bincount(samples((40, 4, 1)).labels[indices])
    assert sorted(counts) == [13, 13, 14]


def test_classes_without_images_are_not_drawn():
    empty = samples((4, 4)).relabeled(np.array([0] * 8, np.int32))
    np.testing.assert_array_equal(build.class_shares(recipe().data, empty), [1, 0])
    with pytest.raises(UserError, match="leaves no image"):
        build.class_shares(recipe(sampling="uniform", sampling_weights=(0, 1)).data, empty)


def test_weights_multiply_the_number_of_images():
    weighted = recipe(sampling="uniform", sampling_weights=(1, 5, 0.5)).data
    np.testing.assert_array_equal(build.class_shares(weighted, samples((40, 4, 1))), [40, 20, 0.5])
    assert build.class_shares(Data(), samples((40, 4, 1))) is None
    with pytest.raises(UserError, match="has 3 weights, but the dataset has 2 classes"):
        build.class_shares(weighted, samples((40, 4)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"sampling_weights": [1, 2]}}, "leave out sampling_weights or sampling"),
        ({"data": {"sampling": "uniform", "sampling_weights": [0, 0]}}, "at least one must be above 0"),
        (
            {"data": {"shuffle": "block"}},
            "sampling balanced: shuffle block reads each image once per epoch: set shuffle to full",
        ),
        ({"data": {"name": "multilabel"}, "loss": {"name": "bce"}}, "leave out sampling balanced; loss.class_weights"),
        ({"loss": {"balanced": True}}, "correct for unequal classes twice: leave out one"),
    ],
)
def test_what_contradicts_weighted_sampling_is_refused(settings, message):
    data = {"sampling": "balanced"} | settings.pop("data", {})
    with pytest.raises(UserError, match=message):
        recipe_files.validate(settings | {"data": data}, "here")
