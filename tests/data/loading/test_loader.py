"""The loader: batches do not depend on threads, world size or start; broken images are handled."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from packing import SPECIAL, special_files
from worldsize.config.recipe import Augment, Data
from worldsize.data.augmentation import operations, policies
from worldsize.data.datasets import file_index
from worldsize.data.file_samples import FileSamples
from worldsize.data.images.crops import CenterCrop, PadCrop, RandomResizedCrop, training_crop
from worldsize.data.loading.loader import Batch, Loader, Treatment
from worldsize.data.samples import ArraySamples
from worldsize.data.sampling.order import permute
from worldsize.data.sampling.random_numbers import Use, uniforms
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World

SIDE, SEED, CLASSES = 12, 7, 3
CROPS = {
    "random": RandomResizedCrop(SIDE, True, (0.08, 1.0), (3 / 4, 4 / 3)),
    "pad": PadCrop(SIDE, True, 3),
    "centre": CenterCrop(SIDE, True, SIDE),
    "resized": CenterCrop(SIDE, False, SIDE + 4),
    "augmented": RandomResizedCrop(SIDE, True, (0.08, 1.0), (3 / 4, 4 / 3)),
    "alternating": training_crop(Data(train_crop="none", alternate_flips=True), SIDE),
}
AUGMENT = Augment(policy="trivialaugment", interpolation="bilinear", color_jitter=(0.4, 0.4, 0.4, 0.1), erasing=0.5)
POLICIES = {"augmented": policies.build(AUGMENT, (0.5, 0.4, 0.3), SIDE)}
ALONE = World(RankInfo("none", 0, 1, 0, 1), torch.device("cpu"), None, 1)


def images(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, SIDE, SIDE, 3), dtype=np.uint8)


def in_memory(n: int = 29) -> ArraySamples:
    labels = np.sort(np.arange(n) % CLASSES).astype(np.int32)
    return ArraySamples("noise", images(n), labels, tuple("abc"))


def in_files(folder: Path, n: int = 29, broken: tuple[int, ...] = ()) -> FileSamples:
    samples = in_memory(n)
    for i in range(n):
        path = folder / "train" / "abc"[samples.labels[i]] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(samples.pixels[i]).save(path)
        if i in broken:
            path.write_bytes(path.read_bytes()[:60])
    return file_index.list_classes(folder / "train", tuple("abc"), folder / "cache")


def make(samples, crop="pad", *, workers=2, prefetch=2, seed=SEED, repeats=1) -> Loader:
    options = {"seed": seed, "workers": workers, "prefetch": prefetch, "pin": False}
    treatment = Treatment(CROPS[crop], POLICIES.get(crop))
    return Loader(samples, CROPS[crop], **options, treatment=lambda epoch: treatment, repeats=repeats)


def prepared(samples: ArraySamples, crop: str, used: list[int], order: np.ndarray, epoch: int) -> np.ndarray:
    """The images ``used`` with the draws of the samples ``order``, one by one."""
    draws = uniforms(SEED, Use.AUGMENT, epoch, order, CROPS[crop].draws)
    if CROPS[crop].alternates:
        in_first = uniforms(SEED, Use.AUGMENT, 0, order, CROPS[crop].draws)[:, 0] < 0.5
        draws[:, 0] = np.where(in_first ^ (epoch % 2 == 1), 0.0, 0.9)
    pixels = np.stack([CROPS[crop].one(samples.image(int(i)), d) for i, d in zip(used, draws, strict=True)])
    if policy := POLICIES.get(crop):
        program = policy.program(uniforms(SEED, Use.POLICY, epoch, order, policy.draws))
        operations.with_pillow(pixels, program, (0, 0, 0))
    return pixels


def epoch_of(samples, plan: BatchPlan, rank=0, epoch=0, first_step=0, **options) -> list[Batch]:
    loader = make(samples, **options)
    try:
        return list(loader.training(plan, rank, epoch, first_step))
    finally:
        loader.close()


def evaluated(samples, world: int, batch: int = 4, **options) -> list[Batch]:
    loader = make(samples, **options)
    try:
        return [b for rank in range(world) for b in loader.evaluation(rank, world, batch)]
    finally:
        loader.close()


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.pixels, b.pixels)
        assert torch.equal(a.labels, b.labels)


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
def test_batches_do_not_depend_on_threads_or_prefetch(tmp_path, crop, files):
    samples = in_files(tmp_path) if files else in_memory()
    plan = BatchPlan(8, 4, 1)
    reference = epoch_of(samples, plan, crop=crop, workers=1, prefetch=1)
    assert len(reference) == 6
    for workers, prefetch in ((4, 1), (4, 3), (1, 50), (3, 50)):
        assert_same(epoch_of(samples, plan, crop=crop, workers=workers, prefetch=prefetch), reference)


@pytest.mark.parametrize("crop", CROPS)
def test_lossless_files_give_the_same_batches_as_memory(tmp_path, crop):
    plan = BatchPlan(8, 4, 1)
    assert_same(epoch_of(in_files(tmp_path), plan, crop=crop), epoch_of(in_memory(), plan, crop=crop))


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_of_any_world_share_the_step_of_one_process(crop, world):
    samples, steps = in_memory(), 3
    alone = epoch_of(samples, BatchPlan(8, 2, 1), epoch=5, crop=crop)
    ranks = [epoch_of(samples, BatchPlan(8, 2, world), rank, epoch=5, crop=crop) for rank in range(world)]
    each = 4 // world
    together = [batch for step in range(steps) for rank in ranks for batch in rank[step * each : (step + 1) * each]]
    assert_same(together, alone)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_repeated_images_are_in_different_micro_batches_with_draws_of_their_own(world):
    samples = in_memory()
    options = {"epoch": 5, "crop": "augmented", "repeats": 3}
    ranks = [epoch_of(samples, BatchPlan(8, 2, world), rank, **options) for rank in range(world)]
    each = 4 // world
    batches = [batch for step in range(3) for rank in ranks for batch in rank[step * each : (step + 1) * each]]
    indices = np.array([batch.indices for batch in batches]).reshape(3, 4, 2)
    first, pixels = permute(SEED, 5, np.arange(9), len(samples)).reshape(3, 3), torch.cat([b.pixels for b in batches])
    for step, micro_batches, of_step in zip(first, indices, pixels.split(8), strict=True):
        assert micro_batches.reshape(-1).tolist() == [*step, *step, *step[:2]]
        assert all(len(set(micro_batch)) == 2 for micro_batch in micro_batches.tolist())
        assert len(of_step.unique(dim=0)) == 8
    once = epoch_of(samples, BatchPlan(8, 2, 1), epoch=5, crop="augmented")
    assert torch.equal(pixels[:2], once[0].pixels)  # the first copy has the draws of an image that is not repeated


@pytest.mark.parametrize("first_step", range(5))
def test_a_later_start_gives_the_rest_of_the_epoch(first_step):
    plan = BatchPlan(6, 3, 1)
    complete = epoch_of(in_memory(), plan, epoch=2)
    assert_same(epoch_of(in_memory(), plan, epoch=2, first_step=first_step), complete[first_step * plan.accumulation :])


@pytest.mark.parametrize("crop", CROPS)
def test_an_epoch_is_the_permutation_cut_by_each_samples_own_draws(crop):
    samples, plan = in_memory(), BatchPlan(8, 4, 1)
    batches = epoch_of(samples, plan, epoch=3, crop=crop)
    order = permute(SEED, 3, np.arange(24), len(samples))
    expected = prepared(samples, crop, order.tolist(), order, 3)
    np.testing.assert_array_equal(torch.cat([b.pixels for b in batches]).numpy(), expected)
    np.testing.assert_array_equal(torch.cat([b.labels for b in batches]).numpy(), samples.labels[order])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_alternating_flips_are_the_opposite_in_every_other_epoch(world):
    samples, plan = in_memory(), BatchPlan(8, 2, world)
    flipped = []
    for epoch in range(4):
        ranks = [epoch_of(samples, plan, rank, epoch, crop="alternating") for rank in range(world)]
        found = {
            int(i): pixels for rank in ranks for b in rank for i, pixels in zip(b.indices, b.pixels.numpy(), strict=True)
        }
        assert all(
            np.array_equal(p, samples.pixels[i]) or np.array_equal(p[:, ::-1], samples.pixels[i]) for i, p in found.items()
        )
        flipped.append({i: not np.array_equal(pixels, samples.pixels[i]) for i, pixels in found.items()})
    assert 5 < sum(flipped[0].values()) < 19  # of 24
    for epoch, flips in enumerate(flipped):
        both = flips.keys() & flipped[0].keys()
        assert len(both) > 12
        assert all(flips[i] == (flipped[0][i] ^ (epoch % 2 == 1)) for i in both)


@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
def test_an_epoch_may_have_a_crop_of_its_own(tmp_path, files):
    samples, plan = in_files(tmp_path) if files else in_memory(), BatchPlan(8, 4, 1)
    small = RandomResizedCrop(8, True, (0.3, 1.0), (1.0, 1.0))
    crops = {1: small, 2: CROPS["random"]}
    options = {"seed": SEED, "workers": 2, "prefetch": 2, "pin": False}
    loader = Loader(samples, CROPS["random"], **options, treatment=lambda epoch: Treatment(crops[epoch]))
    early, late = (list(loader.training(plan, 0, epoch)) for epoch in (1, 2))
    loader.close()
    of_small = Loader(samples, small, seed=SEED, workers=2, prefetch=2, pin=False)
    assert_same(early, list(of_small.training(plan, 0, 1)))
    of_small.close()
    assert_same(late, epoch_of(samples, plan, epoch=2, crop="random"))


def test_a_batch_has_uint8_pixels_and_int64_labels():
    batch = epoch_of(in_memory(), BatchPlan(8, 4, 1))[0]
    assert batch.pixels.shape == (4, SIDE, SIDE, 3)
    assert batch.pixels.dtype == torch.uint8
    assert batch.labels.dtype == torch.int64


def test_epochs_and_seeds_differ():
    plan = BatchPlan(24, 24, 1)
    labels = {
        tuple(epoch_of(in_memory(), plan, epoch=epoch, seed=seed)[0].pixels.flatten().tolist())
        for epoch in (0, 1)
        for seed in (0, 1)
    }
    assert len(labels) == 4


def test_memory_is_never_written_to():
    samples = in_memory()
    for crop in CROPS:
        epoch_of(samples, BatchPlan(8, 4, 1), crop=crop)
        evaluated(samples, 1, crop=crop)
    np.testing.assert_array_equal(samples.pixels, images(29))


@pytest.mark.parametrize("crop", CROPS)
def test_a_broken_image_is_replaced_by_the_next_readable_one_with_its_own_draws(tmp_path, crop):
    broken = (4, 10, 11, 28)
    samples, plan = in_files(tmp_path, broken=broken), BatchPlan(29, 29, 1)
    (batch,) = epoch_of(samples, plan, crop=crop)
    originals = in_memory()
    order = permute(SEED, 0, np.arange(29), 29)
    replacement = {4: 5, 10: 12, 11: 12, 28: 0}
    used = [replacement.get(i, i) for i in order.tolist()]
    np.testing.assert_array_equal(batch.pixels.numpy(), prepared(originals, crop, used, order, 0))
    np.testing.assert_array_equal(batch.labels.numpy(), originals.labels[used])


def test_a_broken_image_is_named_once_and_counted(tmp_path, caplog):
    samples = in_files(tmp_path, broken=(4, 10))
    loader = make(samples)
    with caplog.at_level(logging.WARNING, "worldsize"):
        for epoch in range(3):
            list(loader.training(BatchPlan(29, 29, 1), 0, epoch))
            if epoch == 0:
                assert set(loader.broken.new) == {4, 10}
                assert loader.broken.known == set()
            loader.broken.share(ALONE)
            assert loader.broken.known == {4, 10}
            assert loader.broken.new == {}
    loader.close()
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 2
    for i in (4, 10):
        assert sum(samples.name(i) in message for message in messages) == 1


@pytest.mark.parametrize("workers", [1, 4])
def test_a_missing_file_counts_as_broken(tmp_path, workers):
    samples = in_files(tmp_path)
    Path(samples.name(3)).unlink()
    loader = make(samples, workers=workers)
    list(loader.training(BatchPlan(29, 29, 1), 0, 0))
    loader.close()
    assert list(loader.broken.new) == [3]
    assert "No such file" in loader.broken.new[3]


def test_what_is_not_a_regular_file_counts_as_broken(tmp_path):
    in_files(tmp_path)
    with special_files(tmp_path / "train" / "b"):
        samples = file_index.list_classes(tmp_path / "train", tuple("abc"), tmp_path / "cache")
        loader = make(samples)
        batches = list(loader.training(BatchPlan(34, 34, 1), 0, 0))
        loader.close()
    assert {Path(samples.name(i)).name: reason for i, reason in loader.broken.new.items()} == SPECIAL
    assert [len(batch.labels) for batch in batches] == [34]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
def test_evaluation_covers_every_sample_once_and_in_order(tmp_path, world, files):
    batches = evaluated(in_files(tmp_path) if files else in_memory(), world, crop="resized")
    samples = in_memory()
    expected = np.stack([CROPS["resized"].one(samples.image(i), np.zeros(1)) for i in range(len(samples))])
    np.testing.assert_array_equal(torch.cat([b.pixels for b in batches]).numpy(), expected)
    np.testing.assert_array_equal(torch.cat([b.labels for b in batches]).numpy(), samples.labels)
    assert max(len(b.labels) for b in batches) <= 4


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_evaluation_skips_broken_images(tmp_path, world):
    broken = (0, 8, 9, 10, 11, 28)
    batches = evaluated(in_files(tmp_path, broken=broken), world, crop="resized")
    samples = in_memory()
    readable = [i for i in range(29) if i not in broken]
    expected = np.stack([CROPS["resized"].one(samples.image(i), np.zeros(1)) for i in readable])
    np.testing.assert_array_equal(torch.cat([b.pixels for b in batches]).numpy(), expected)
    np.testing.assert_array_equal(torch.cat([b.labels for b in batches]).numpy(), samples.labels[readable])


def test_fewer_batches_than_ranks_leave_some_ranks_without_work():
    loader = make(in_memory(6), crop="resized")
    assert [sum(len(b.labels) for b in loader.evaluation(rank, 5, 4)) for rank in range(5)] == [0, 0, 4, 0, 2]
    loader.close()


def test_evaluation_has_the_same_batches_at_every_world_size():
    batches = [[b.indices.tolist() for b in evaluated(in_memory(), world, crop="resized")] for world in (1, 2, 5)]
    assert batches[0] == [list(range(i, min(i + 4, 29))) for i in range(0, 29, 4)]
    assert batches[1] == batches[2] == batches[0]


def test_batches_name_the_samples_that_replace_broken_ones(tmp_path):
    broken = (0, 8, 9)
    loader = make(in_files(tmp_path, broken=broken))
    plan, labels = BatchPlan(4, 4, 1), in_memory().labels
    shuffled = permute(SEED, 0, np.arange(28), 29)
    expected = [next(i for i in range(k, k + 29) if i % 29 not in broken) % 29 for k in shuffled.tolist()]
    batches = list(loader.training(plan, 0, 0))
    assert [i for b in batches for i in b.indices.tolist()] == expected
    assert [y for b in batches for y in b.labels.tolist()] == labels[expected].tolist()
    loader.close()
