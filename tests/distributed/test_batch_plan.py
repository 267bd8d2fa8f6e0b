"""Batch plans: each sample of a step is computed once, at any world size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldsize.config.recipe import Recipe
from worldsize.distributed.batch_plan import BatchPlan, evaluation_share, plan, shard, world_sizes
from worldsize.errors import UserError

SMALL = st.integers(1, 12)


@given(world=SMALL, accumulation=SMALL, micro=st.integers(1, 40), step=st.integers(0, 10**6))
def test_micro_batches_of_all_ranks_cover_a_step_exactly_once_and_in_order(world, accumulation, micro, step):
    total = world * accumulation * micro
    shared = plan(Recipe(global_batch=total, micro_batch=micro), world)
    assert (shared.accumulation, shared.per_process, shared.world_size) == (accumulation, accumulation * micro, world)
    positions = [
        position
        for rank in range(world)
        for m in range(shared.accumulation)
        for position in range(shared.first(step, rank, m), shared.first(step, rank, m) + micro)
    ]
    assert positions == list(range(step * total, (step + 1) * total))


@given(micro_batches=st.integers(1, 60), micro=st.integers(1, 40))
def test_every_world_computes_the_same_micro_batches(micro_batches, micro):
    total = micro_batches * micro
    expected = {BatchPlan(total, micro, 1).first(3, 0, m) for m in range(micro_batches)}
    for world in world_sizes(total, micro):
        shared = plan(Recipe(global_batch=total, micro_batch=micro), world)
        starts = [shared.first(3, rank, m) for rank, m in itertools.product(range(world), range(shared.accumulation))]
        assert set(starts) == expected
        assert len(starts) == len(expected)


@given(micro_batches=st.integers(1, 100), micro=st.integers(1, 40), world=st.integers(1, 120))
def test_a_world_that_does_not_fit_is_refused_with_exactly_the_divisors(micro_batches, micro, world):
    recipe = Recipe(global_batch=micro_batches * micro, micro_batch=micro)
    if micro_batches % world == 0:
        assert plan(recipe, world).world_size == world
        return
    with pytest.raises(UserError) as caught:
        plan(recipe, world)
    listed = str(caught.value).split("World sizes that fit: ")[1].split(".")[0]
    assert listed == ", ".join(str(w) for w in range(1, micro_batches + 1) if micro_batches % w == 0)
    assert "--global-batch" in str(caught.value)


@given(samples=st.integers(0, 10_000), world=st.integers(1, 70))
def test_shards_are_consecutive_complete_and_of_nearly_one_size(samples, world):
    shards = [shard(samples, rank, world) for rank in range(world)]
    assert list(itertools.chain.from_iterable(shards)) == list(range(samples))
    sizes = [len(s) for s in shards]
    assert max(sizes) - min(sizes) <= 1


@given(samples=st.integers(0, 10_000), world=st.integers(1, 70), batch=st.integers(1, 300))
def test_ranks_evaluate_complete_batches_and_every_sample_once(samples, world, batch):
    shares = [evaluation_share(samples, rank, world, batch) for rank in range(world)]
    assert list(itertools.chain.from_iterable(shares)) == list(range(samples))
    assert all(share.start % batch == 0 for share in shares if share)
    assert max(map(len, shares)) - min(map(len, shares)) < 2 * batch


@given(accumulation=SMALL, micro=SMALL, world=st.integers(1, 64))
def test_a_batch_per_process_grows_with_the_world(accumulation, micro, world):
    recipe = Recipe(per_process_batch=accumulation * micro, micro_batch=micro)
    grown = plan(recipe, world)
    assert grown.global_batch == accumulation * micro * world
    assert grown.accumulation == accumulation
    assert grown.per_process == accumulation * micro


@given(batch=st.integers(1, 500), samples=st.integers(0, 5000))
def test_an_epoch_is_the_complete_batches_and_at_least_one(batch, samples):
    shared = BatchPlan(batch, 1, 1)
    if samples < batch:
        with pytest.raises(UserError, match=rf"{samples} images.*--global-batch to at most {samples}"):
            shared.steps_per_epoch(samples)
    else:
        steps = shared.steps_per_epoch(samples)
        assert steps * batch <= samples < (steps + 1) * batch


def test_the_whole_run_ends_at_max_steps_if_that_is_sooner():
    recipe = Recipe(epochs=3, global_batch=32, micro_batch=32)
    shared = plan(recipe, 1)
    assert shared.total_steps(recipe, 100) == 9
    assert shared.total_steps(recipe.model_copy(update={"max_steps": 5}), 100) == 5
    assert shared.total_steps(recipe.model_copy(update={"max_steps": 50}), 100) == 9
