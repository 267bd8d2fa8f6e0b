"""Samples to uint8 batches, prepared ahead by two pools of threads: one reads, one decodes.

Which samples, in which order and how they are cut is decided by pure functions (`order`, `rng`, `crops`); the
threads only decide when. Reading and decoding release the interpreter lock, so threads scale and nothing is copied
between processes. Readers are many because on network storage they mostly wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worldsize.batch import BatchPlan, shard
from worldsize.data.crops import Crop, Draws, Pixels
from worldsize.data.order import FullShuffle, Indices, Order
from worldsize.data.prepare import Preparation
from worldsize.data.rng import Use, uniforms
from worldsize.data.samples import EncodedSamples, Read, Samples
from worldsize.errors import DataError
from worldsize.world import World

log = logging.getLogger(__name__)

# Pictures per task: threads wait for Python's lock at each hand-over, and the training loop for the threads, so tasks are as
# large as may be. But where pictures are read one by one, a loader that ends waits for all of a task.
_LEAST, _MOST = 8, 32
_ORDERED = 4096  # samples whose order is computed at once: for few numpy takes ten times as long a sample

_REACH = 100  # how far to look for a whole picture in place of a broken one


@dataclass(frozen=True)
class Batch:
    """``pixels``: uint8 (n, size, size, 3), in pinned memory for a GPU; ``labels``: int64 (n,)."""

    pixels: torch.Tensor
    labels: torch.Tensor


class BrokenPictures:
    """Which pictures of a split could not be decoded; each is named once in the log.

    ``known`` are those that all ranks know of, ``new`` those that this rank met since.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._lock = threading.Lock()
        self.known: set[int] = set()
        self.new: dict[int, str] = {}

    def add(self, index: int, reason: str) -> None:
        with self._lock:
            if index in self.known or index in self.new:
                return
            self.new[index] = reason
        self._tell(index, reason)

    def share(self, world: World) -> None:
        """Let all ranks know what each of them met (each rank must call this at the same point)."""
        with self._lock:
            for rank, met in enumerate(world.gather(self.new)):
                for index in met.keys() - self.known:
                    if world.is_main and rank != world.rank:  # so that one log names them all
                        self._tell(index, met[index])
                self.known |= met.keys()
            self.new.clear()

    def _tell(self, index: int, reason: str) -> None:
        log.warning("broken picture %s: %s", self._samples.name(index), reason)


class Loader:
    """Batches of one split.

    Args:
        samples: the split.
        crop: how its pictures are cut, unless `training` is told otherwise.
        seed: the recipe's seed.
        workers: decoding threads.
        readers: reads in flight.
        prefetch: batches prepared ahead.
        pin: whether batches go to a GPU.
        scaling: as in `Preparation`.
        order: of the samples of an epoch; a full shuffle unless it is given.
    """

    def __init__(
        self,
        samples: Samples,
        crop: Crop,
        *,
        seed: int,
        workers: int,
        readers: int = 16,
        prefetch: int,
        pin: bool,
        scaling: bool = False,
        order: Order | None = None,
    ) -> None:
        self.samples = samples
        self.broken = BrokenPictures(samples)
        self.crop = crop
        self._seed = seed
        self._order = order or FullShuffle(seed, len(samples))
        self._prefetch = prefetch
        self._threads = max(readers, workers)
        self._pin = pin
        self._preparation = Preparation(scaling)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="read")

    def training(
        self, plan: BatchPlan, rank: int, epoch: int, first_step: int = 0, crop: Crop | None = None
    ) -> Iterator[Batch]:
        """This rank's micro-batches of ``epoch``, from step ``first_step`` of it to its end.

        ``crop`` is for this epoch alone, such as a smaller one in early epochs. A broken picture is replaced by the next one
        in the set that is whole, cut as the broken one would be.
        """
        steps = range(first_step, plan.steps_per_epoch(len(self.samples)))
        return Stream(self._prefetch, self._parts(plan, rank, epoch, steps, crop))

    def steps(self) -> Stream:
        """An empty stream, for `add_step`."""
        return Stream(self._prefetch, ())

    def add_step(self, stream: Stream, plan: BatchPlan, epoch: int, step: int) -> None:
        """Let the micro-batches of one step of ``epoch`` follow in the stream, as for rank 0."""
        stream.add(self._parts(plan, 0, epoch, range(step, step + 1)))

    def _parts(self, plan: BatchPlan, rank: int, epoch: int, steps: range, crop: Crop | None = None) -> Iterator[_Pending]:
        at_once = max(1, _ORDERED // plan.per_process)
        for some in (steps[i : i + at_once] for i in range(0, len(steps), at_once)):
            firsts = np.array([plan.first(step, rank, 0) for step in some])
            order = self._order(epoch, (firsts[:, None] + np.arange(plan.per_process)).reshape(-1))
            for indices in order.reshape(-1, plan.forward_batch):
                yield self._submit(crop or self.crop, indices, epoch, replace=True)

    def evaluation(self, rank: int, world_size: int, batch: int) -> Iterator[Batch]:
        """This rank's share of the split in order, every sample once; a broken picture is left out."""
        mine = shard(len(self.samples), rank, world_size)
        starts = range(mine.start, mine.stop, batch)
        requests = (np.arange(start, min(start + batch, mine.stop)) for start in starts)
        return Stream(self._prefetch, (self._submit(self.crop, indices, 0, replace=False) for indices in requests))

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        # First those that the others wait for.
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, crop: Crop, indices: Indices, epoch: int, replace: bool) -> _Pending:
        size = crop.size
        pixels = torch.empty((len(indices), size, size, 3), dtype=torch.uint8, pin_memory=self._pin)
        labels = torch.empty(len(indices), dtype=torch.int64, pin_memory=self._pin)
        draws = uniforms(self._seed, Use.AUGMENT, epoch, indices, crop.draws)
        places = Places(crop, indices, draws, pixels.numpy(), labels.numpy())
        if self.samples.pixels is not None:
            return _Pending(pixels, labels, [self._pool.submit(self._fill_from_memory, places)])
        assert isinstance(self.samples, EncodedSamples)
        chunk = self._chunk(len(indices))
        parts = []
        for part in (places.part(slice(i, i + chunk)) for i in range(0, len(indices), chunk)):
            read = self._readers.submit(self.samples.several, part.indices)
            parts.append(self._pool.submit(self._fill_from_files, part, read, replace))
        return _Pending(pixels, labels, parts)

    def _chunk(self, batch: int) -> int:
        """Pictures per task: two tasks for each thread, all batches that are prepared at a time together."""
        assert isinstance(self.samples, EncodedSamples)
        fair = batch * (self._prefetch + 1) // (2 * self._threads)
        return min(max(fair, _LEAST), _MOST) if self.samples.together else _LEAST

    def _fill_from_memory(self, places: Places) -> list[bool]:
        assert self.samples.pixels is not None
        cut = places.crop.batch(self.samples.pixels[places.indices], places.draws)
        if cut is None:
            pictures = zip(places.indices, places.draws, strict=True)
            cut = np.stack([places.crop.one(self.samples.picture(int(i)), draws) for i, draws in pictures])
        places.pixels[:] = cut
        places.labels[:] = self.samples.labels[places.indices]
        return [True] * len(places.indices)

    def _fill_from_files(self, places: Places, read: Future[list[Read]], replace: bool) -> list[bool]:
        """Cut what was read; says which places were filled."""
        places.labels[:] = self.samples.labels[places.indices]
        faults = self._preparation.fill(places.crop, read.result(), places.draws, places.pixels)
        for i, fault in enumerate(faults):
            if fault is not None:
                self.broken.add(int(places.indices[i]), fault)
        return [fault is None or (replace and self._replace(places.part(slice(i, i + 1)))) for i, fault in enumerate(faults)]

    def _replace(self, place: Places) -> bool:
        """Put the next picture that is whole into the place of a broken one, cut as that would have been."""
        assert isinstance(self.samples, EncodedSamples)
        n = len(self.samples)
        reach = min(n, _REACH)
        for offset in range(1, reach):
            candidate = (place.indices + offset) % n
            (fault,) = self._preparation.fill(place.crop, self.samples.several(candidate), place.draws, place.pixels)
            if fault is None:
                place.labels[:] = self.samples.labels[candidate]
                return True
            self.broken.add(int(candidate[0]), fault)
        raise DataError(f"{reach} pictures in a row cannot be decoded, from {self.samples.name(int(place.indices[0]))} on")


@dataclass(frozen=True)
class Places:
    """Where in a batch which samples go, and how they are cut: n of each."""

    crop: Crop
    indices: Indices
    draws: Draws
    pixels: Pixels
    labels: NDArray[np.int64]

    def part(self, which: slice) -> Places:
        """Some of them."""
        return Places(self.crop, self.indices[which], self.draws[which], self.pixels[which], self.labels[which])


class Stream(Iterator[Batch]):
    """Batches in order, of which ``prefetch`` are being prepared while one is used. Each item of ``source`` begins one."""

    def __init__(self, prefetch: int, source: Iterable[_Pending]) -> None:
        self._prefetch = prefetch
        self._sources = deque([iter(source)])
        self._begun: deque[_Pending] = deque()

    def add(self, source: Iterable[_Pending]) -> None:
        """Let these follow."""
        self._sources.append(iter(source))

    def __next__(self) -> Batch:
        while self._sources and len(self._begun) <= self._prefetch:
            pending = next(self._sources[0], None)
            if pending is None:
                self._sources.popleft()
            else:
                self._begun.append(pending)
        if not self._begun:
            raise StopIteration
        return self._begun.popleft().result()


@dataclass(frozen=True)
class _Pending:
    """A batch whose parts are still being filled."""

    pixels: torch.Tensor
    labels: torch.Tensor
    parts: list[Future[list[bool]]]

    def result(self) -> Batch:
        filled = [ok for part in self.parts for ok in part.result()]
        if all(filled):
            return Batch(self.pixels, self.labels)
        keep = torch.tensor(filled)
        return Batch(self.pixels[keep], self.labels[keep])
