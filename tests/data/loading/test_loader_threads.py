"""The loader's threads: how much they prepare and read ahead, that they share the work, and how they end."""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np
import pytest
from test_loader import CROPS, SEED, assert_same, epoch_of, evaluated, images, in_files, in_memory, make

from worldsize.data import shards
from worldsize.data.file_samples import FileSamples
from worldsize.data.images import native
from worldsize.data.images.crops import CenterCrop
from worldsize.data.loading.loader import Loader
from worldsize.data.samples import ArraySamples, EncodedSamples
from worldsize.distributed.batch_plan import BatchPlan


def decoding_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith(("decode", "read"))}


@pytest.mark.parametrize("taken", [0, 1, None])
def test_closing_ends_the_threads_even_in_the_middle_of_an_epoch(tmp_path, taken):
    before = decoding_threads()
    loader = make(in_files(tmp_path), workers=4, prefetch=3)
    batches = loader.training(BatchPlan(4, 4, 1), 0, 0)
    for _ in range(100 if taken is None else taken):
        next(batches, None)
    if taken is None or taken:
        assert decoding_threads() - before
    loader.close()
    assert not decoding_threads() - before


@pytest.mark.parametrize(("size", "batch", "together"), [(224, 4096, 8), (64, 4096, 32), (32, 4096, 64), (32, 8, 8)])
def test_small_images_are_decoded_many_at_a_time(tmp_path, size, batch, together):
    """Their hand-over to a thread takes longer than decoding them."""
    loader = make(in_files(tmp_path), workers=1, prefetch=1)
    assert loader._chunk(batch, CenterCrop(size, False, size)) == together
    loader.close()


@pytest.mark.skipif(native.load() is None, reason="needs the native reader")
@pytest.mark.parametrize(("size", "together"), [(224, 32), (64, 32), (32, 128)])
def test_small_images_in_shards_are_never_few_at_a_time(packed_root, size, together):
    """Also where there are many threads: they would wait for each other."""
    loader = make(shards.open_dataset(packed_root).train, workers=16, prefetch=4)
    assert loader.samples.reads_many
    assert loader._chunk(512, CenterCrop(size, False, size)) == together
    loader.close()


def test_images_in_memory_are_cropped_many_at_a_time():
    loader = make(in_memory(), workers=16, prefetch=4)
    assert loader._chunk(512, CenterCrop(32, False, 32)) == 128
    loader.close()


def test_no_more_is_prepared_than_asked_for():
    prepared = []

    class Counted(ArraySamples):
        def several(self, indices: np.ndarray) -> np.ndarray:
            prepared.extend(indices)
            return super().several(indices)

    samples = Counted("noise", images(40), np.zeros(40, np.int32), ("a",))
    loader = make(samples, crop="random", prefetch=3)
    batches = loader.training(BatchPlan(2, 2, 1), 0, 0)
    next(batches)
    loader.close()
    assert len(prepared) <= 2 * (3 + 1)


class Meeting(ArraySamples):
    """Images in memory; taking the first ones waits until another thread takes the last ones of the same batch, or 60 s."""

    met = False

    def several(self, indices: np.ndarray) -> np.ndarray:
        if 0 in indices or len(self) - 1 in indices:
            with suppress(threading.BrokenBarrierError):
                self.barrier.wait(60)
                self.met = True
        return super().several(indices)


@pytest.mark.parametrize("crop", ["pad", "resized"])
def test_threads_share_a_batch_of_images_in_memory(crop):
    samples = Meeting("noise", images(1800), np.zeros(1800, np.int32), ("a",))
    samples.barrier = threading.Barrier(2)
    assert len(evaluated(samples, world=1, batch=1800, crop=crop)) == 1
    assert samples.met


class Slow(FileSamples):
    """Slow storage: each read waits until ``at_once`` reads are in flight, or 60 seconds."""

    several = EncodedSamples.several  # by `encoded`

    def watch(self, at_once: int) -> Slow:
        self.barrier = threading.Barrier(at_once)
        self.waited = 0
        return self

    def encoded(self, index: int) -> bytes:
        with suppress(threading.BrokenBarrierError):
            self.barrier.wait(60)
            self.waited += 1
        return super().encoded(index)


@pytest.mark.parametrize("readers", [1, 3])
def test_as_many_reads_wait_at_once_as_there_are_readers(tmp_path, readers):
    files = in_files(tmp_path)
    samples = Slow(files.root, files.folders, files.files, files.ends, files.labels, files.classes).watch(readers)
    loader = Loader(samples, CROPS["random"], seed=SEED, workers=1, readers=readers, prefetch=5, pin=False)
    batches = list(loader.training(BatchPlan(8, 8, 1), 0, 0))
    loader.close()
    assert samples.waited == 24
    assert_same(batches, epoch_of(files, BatchPlan(8, 8, 1), crop="random"))


def test_no_more_is_read_than_asked_for(tmp_path):
    files = in_files(tmp_path)
    samples = Slow(files.root, files.folders, files.files, files.ends, files.labels, files.classes).watch(1)
    loader = Loader(samples, CROPS["random"], seed=SEED, workers=1, readers=8, prefetch=3, pin=False)
    next(loader.training(BatchPlan(2, 2, 1), 0, 0))
    loader.close()
    assert samples.waited <= 2 * (3 + 1)


def test_closing_does_not_wait_for_reads_that_have_not_begun(tmp_path):
    files = in_files(tmp_path)
    samples = Slow(files.root, files.folders, files.files, files.ends, files.labels, files.classes).watch(2)
    loader = Loader(samples, CROPS["random"], seed=SEED, workers=2, readers=1, prefetch=20, pin=False)
    batches = loader.training(BatchPlan(1, 1, 1), 0, 0)
    closing = threading.Thread(target=loader.close)
    loading = threading.Thread(target=lambda: suppress_all(lambda: next(batches)))
    loading.start()
    while not samples.barrier.n_waiting:
        loading.join(0.01)
    closing.start()
    samples.barrier.abort()
    closing.join(240)
    loading.join(240)
    assert not closing.is_alive() and not loading.is_alive()
    assert samples.waited == 0


def suppress_all(function) -> None:
    with suppress(BaseException):
        function()
