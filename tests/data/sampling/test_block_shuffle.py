"""Block shuffle: no sample twice, independent of the world size, each block read once and by as few ranks as possible."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from packing import encode, noise, odd_folder, packed
from paths import SMALL_NETWORK
from processes import distance, weights
from trees import put
from worldsize.config.recipe import Data, Recipe
from worldsize.data.images.crops import RandomResizedCrop
from worldsize.data.loading import build
from worldsize.data.loading.loader import Loader
from worldsize.data.samples import ArraySamples
from worldsize.data.sampling.block_shuffle import BlockShuffle
from worldsize.data.shards import open_dataset
from worldsize.data.shards.ahead import Ahead, Pieces
from worldsize.data.shards.store import Local, Store
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World

ALONE = World(RankInfo("none", 0, 1, 0, 1), torch.device("cpu"), None, 1)
SEEDS, EPOCHS = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)


@st.composite
def orders(draw):
    batch = draw(st.integers(1, 64))
    block = draw(st.integers(1, 40))
    samples = draw(st.integers(batch, 2000))
    return BlockShuffle(draw(SEEDS), samples, batch, block, draw(st.integers(block, 600)))


def complete(order: BlockShuffle, epoch: int = 0) -> np.ndarray:
    return order(epoch, np.arange(order.samples // order.global_batch * order.global_batch))


@given(orders(), EPOCHS)
def test_an_epoch_visits_no_sample_twice(order, epoch):
    visited = complete(order, epoch)
    assert visited.dtype == np.int64
    assert len(np.unique(visited)) == len(visited)
    assert visited.min() >= 0 and visited.max() < order.samples


@given(orders(), EPOCHS, st.data())
def test_any_part_of_an_order_equals_that_part_of_the_whole(order, epoch, data):
    visited = complete(order, epoch)
    chosen = np.array(data.draw(st.lists(st.integers(0, len(visited) - 1), min_size=1, max_size=20)))
    np.testing.assert_array_equal(order(epoch, chosen), visited[chosen])


@pytest.mark.parametrize("samples", [160_167, pytest.param(1_281_167, marks=pytest.mark.slow)])
def test_an_epoch_of_imagenet_or_an_eighth_visits_every_image_but_for_the_remainder_once(samples):
    order = BlockShuffle(0, samples, 1024, 32, 16384)
    assert (order.lanes, order.mixed) == (512, 1)
    seen = np.zeros(order.samples, np.int64)
    steps = order.samples // 1024
    for step in range(0, steps, 50):
        np.add.at(seen, order(3, np.arange(step * 1024, min(step + 50, steps) * 1024)), 1)
    assert (seen.max(), seen.sum()) == (1, steps * 1024)


@pytest.mark.parametrize(
    "order", [BlockShuffle(1, 60, 6, 4, 8), BlockShuffle(1, 62, 6, 7, 21), BlockShuffle(1, 10, 5, 16, 16)]
)
def test_every_sample_is_equally_likely_at_every_position(order):
    epochs, length = 600, order.samples // order.global_batch * order.global_batch
    cells = np.zeros((length, order.samples))
    for epoch in range(epochs):
        cells[np.arange(length), complete(order, epoch)] += 1
    expected = epochs / order.samples
    for position in cells:
        assert stats.chisquare(position, np.full(order.samples, expected)).pvalue > 1e-5


def test_seed_and_epoch_each_give_another_order():
    seen = {tuple(complete(BlockShuffle(seed, 96, 8, 4, 32), epoch)) for seed in (0, 1, 2**32, 2**63) for epoch in (0, 1, 2)}
    assert len(seen) == 12


def test_pools_of_one_epoch_are_mixed_differently():
    """With global batch 1 and one block per pool, positions are the stream: compare the order within each pool."""
    order = BlockShuffle(5, 640, 1, 64, 64)
    assert len({tuple(pool % 64) for pool in complete(order).reshape(10, 64)}) == 10


def test_blocks_come_in_another_order_each_epoch():
    order = BlockShuffle(5, 640, 1, 16, 16)
    sequences = [tuple(complete(order, epoch)[::16] // 16) for epoch in range(3)]
    assert len(set(sequences)) == 3
    assert np.mean(np.diff(sequences) == 1) < 0.2


def test_a_batch_comes_from_as_many_blocks_as_there_are_lanes():
    order = BlockShuffle(0, 64 * 640, 256, 64, 256 * 64)
    assert order.lanes == 256
    for step in (0, 1, 70, 140):
        blocks = order(0, np.arange(step * 256, (step + 1) * 256)) // 64
        assert len(np.unique(blocks)) > 240  # two lanes can be in the same block


@pytest.mark.parametrize(("batch", "pool"), [(256, 4096), (256, 65536), (96, 1000), (7, 7 * 64)])
def test_lanes_share_the_batch_evenly_and_fill_the_pool(batch, pool):
    order = BlockShuffle(0, 100_000, batch, 32, pool)
    assert batch % order.lanes == 0
    assert pool / 3 < order.lanes * order.mixed * 32 <= pool


# Reading -------------------------------------------------------------------------------------------------------------


class Counting(Local):
    """Record reads: (file, offset, length)."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.reads, self.looked = [], []

    def look(self, name, length):
        self.looked.append(name)
        return super().look(name, length)

    several = Store.several  # implemented with `read`, and that with `peek`, so all reads are counted

    def peek(self, name, offset, length):
        self.reads.append((name, offset, length))
        return super().peek(name, offset, length)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("blocks")
    packed(odd_folder(root / "originals"), root / "shards")
    return root / "shards"


@pytest.mark.parametrize("block", [1, 3, 5, 100])
def test_blocks_give_the_same_bytes_and_each_is_read_once(folder, block):
    plain, store = open_dataset(folder).train, Counting(folder)
    samples = open_dataset(store).train.in_blocks(block, 100)
    for index in np.random.default_rng(block).permutation(len(plain)):
        assert bytes(samples.encoded(int(index))) == bytes(plain.encoded(int(index)))
    parts = {(plain.shard_of(i), i // block) for i in range(len(plain)) if plain.length(i)}
    assert len(store.reads) == len(set(store.reads)) == len(parts)
    assert samples._store._cache == {}
    assert samples.name(1) == plain.name(1)
    assert store.reads[-1][2] == plain.records["head"][1]  # a name is read without its block


@pytest.mark.parametrize("workers", [1, 4])
def test_training_in_blocks_cuts_the_same_images_from_files_as_from_shards(folder, workers):
    plan, crop = BatchPlan(4, 2, 1), RandomResizedCrop(16, True, (0.08, 1), (3 / 4, 4 / 3))
    plain, store = open_dataset(folder).train, Counting(folder)
    order = BlockShuffle(0, len(plain), 4, 3, 6)
    batches = []
    for samples in (plain, open_dataset(store).train.in_blocks(3, order.kept(1, workers))):
        loader = Loader(samples, crop, seed=0, workers=workers, readers=workers, prefetch=2, pin=False, order=order)
        batches.append([batch for epoch in (0, 1) for batch in loader.training(plan, 0, epoch)])
        loader.close()
    assert len(batches[0]) == len(batches[1]) > 4
    for one, other in zip(*batches, strict=True):
        assert (one.pixels == other.pixels).all() and (one.labels == other.labels).all()
    assert len(store.reads) < 4 * len(batches[1])  # images


def pieces(_name: str) -> Pieces:
    return Pieces(np.array([10, 20, 30]), np.array([2, 2]))


@pytest.fixture
def digits(tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789" * 4)
    return Counting(tmp_path)


def test_a_recipe_decides_whether_blocks_are_read(folder, caplog):
    def loader(samples, **settings):
        recipe = Recipe(global_batch=4, micro_batch=2, data=Data(train_crop_size=16, **settings))
        return build.train_loader(recipe, samples, BatchPlan(4, 2, 1), ALONE)

    for shuffle, blocks_read in (("full", False), ("block", True)):
        store = Counting(folder)
        samples, opened = open_dataset(store).train, len(store.looked)
        blocks = loader(samples, shuffle=shuffle, block=3, pool=6)
        assert len(store.looked) == opened  # the shards are not opened again
        list(blocks.training(BatchPlan(4, 2, 1), 0, 0))
        blocks.close()
        longest = samples.records["length"].max()
        assert any(length > longest for _, _, length in store.reads) == blocks_read
    assert "not packed" not in caplog.text
    loader(ArraySamples("noise", np.zeros((8, 16, 16, 3), np.uint8), np.zeros(8, np.int32), ("a",)), shuffle="block").close()
    assert "this dataset is not packed" in caplog.text


def test_bytes_in_no_piece_or_in_two_are_read_alone(digits):
    ahead = Ahead(digits, pieces, 4)
    assert [bytes(ahead.read("f", at, 4)) for at in (0, 8, 18, 28, 30, 38)] == [
        b"0123", b"8901", b"8901", b"8901", b"0123", b"89",
    ]  # fmt: skip
    assert {length for _, _, length in digits.reads} == {4}
    assert bytes(ahead.read("f", 16, 4)) == b"6789" and digits.reads[-1] == ("f", 10, 10)


def test_the_least_recently_used_piece_is_evicted(digits):
    ahead = Ahead(digits, lambda name: Pieces(np.arange(0, 41, 10), np.full(4, 9)), 2)
    for at in (0, 10, 0, 20, 0, 10):
        ahead.read("f", at, 1)
    assert digits.reads == [("f", at, 10) for at in (0, 10, 20, 10)]


def test_a_failed_read_of_a_piece_is_retried(digits, monkeypatch):
    ahead = Ahead(digits, pieces, 4)
    with monkeypatch.context() as broken:
        broken.setattr(digits, "read", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            ahead.read("f", 10, 4)
    assert bytes(ahead.read("f", 10, 4)) == b"0123"


def test_concurrent_reads_of_one_piece_wait_for_one_read(digits, monkeypatch):
    ahead, read, gate = Ahead(digits, lambda _: Pieces(np.array([0, 40]), np.array([99])), 4), digits.read, threading.Event()

    def slow(*arguments):
        gate.wait(240)
        return read(*arguments)

    monkeypatch.setattr(digits, "read", slow)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ahead.read, "f", at, 1) for at in range(8)]
        gate.set()
        assert b"".join(bytes(future.result()) for future in futures) == b"01234567"
    assert digits.reads == [("f", 0, 40)]


@pytest.mark.parametrize("world_size", [1, 4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_rank_reads_few_blocks_of_others_and_few_twice(tmp_path, world_size):
    """An image is one byte here. Lanes start and end within blocks of other lanes: 64 x 2 of 1,250 blocks."""
    order, plan = BlockShuffle(0, 20_000, 64, 16, 2048), BatchPlan(64, 4, world_size)
    (tmp_path / "f").write_bytes(bytes(20_000))
    read = 0
    for rank in range(world_size):
        store = Counting(tmp_path)
        ahead = Ahead(store, lambda _: Pieces(np.arange(0, 20_001, 16), np.full(1250, 16)), order.kept(world_size, 0))
        for step in range(plan.steps_per_epoch(order.samples)):
            first = plan.first(step, rank, 0)
            for sample in order(7, np.arange(first, first + plan.per_process)):
                ahead.read("f", int(sample), 1)
            assert len(ahead._cache) <= 1.25 * (2048 / 16 / world_size + order.mixed)
        read += len(store.reads)
    assert 1240 <= read <= 1250 + 2 * 128


@pytest.mark.slow
def test_a_run_in_blocks_has_the_same_weights_in_two_processes_and_from_a_url(ranks, tmp_path):
    for i in range(45):
        put(tmp_path / "root" / "train" / "abc"[i // 15] / f"{i}.png", encode(noise(32, 32, i), "PNG"))
        put(tmp_path / "root" / "val" / "abc"[i // 15] / f"{i}.png", encode(noise(32, 32, i), "PNG"))
    packed(tmp_path / "root", tmp_path / "shards", shard_bytes=40_000)
    settings = ["--data.name", "folder", "--model.name", SMALL_NETWORK, "--precision", "fp64", "--epochs", "1"]
    settings += ["--global-batch", "12", "--micro-batch", "6", "--schedule.warmup-epochs", "0"]

    def train(size: int, name: str, root: object, *options: str) -> Path:
        ranks(size).run("train", "digits", *settings, "--name", name, "--data.root", root, *options)
        return ranks.cwd / "runs" / name

    block = ("--data.shuffle", "block", "--data.block", "4", "--data.pool", "16")
    files = train(1, "files", tmp_path / "root", *block)
    assert distance(weights(train(2, "shards", f"file://{tmp_path}/shards", *block)), weights(files)) < 1e-9
    assert distance(weights(train(1, "full", tmp_path / "shards")), weights(files)) > 1e-3


def test_evaluation_reads_each_block_once(folder):
    store = Counting(folder)
    recipe = Recipe(data=Data(val_crop_size=16, val_resize_size=16, shuffle="block", block=3, pool=3))
    val = open_dataset(store).val
    loader = build.val_loader(recipe, val, ALONE)
    store.reads.clear()
    assert sum(len(batch.labels) for batch in loader.evaluation(0, 1, 4)) == len(val) == 2
    loader.close()
    assert len(store.reads) == 1
