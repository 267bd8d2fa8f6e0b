"""Load uint8 batches ahead of time with two thread pools: one reads, one decodes.

Pure functions (`order`, `random_numbers`, `crops`) decide which samples are used, in which order, and how they are cropped;
the threads only affect timing. Reading and decoding release the GIL, so threads scale and nothing is copied between
processes. There are many readers because on network storage they mostly wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from worldsize.config.wording import printable
from worldsize.data.augmentation import apply
from worldsize.data.augmentation.mixing import Mixing
from worldsize.data.augmentation.operations import Color, Program
from worldsize.data.augmentation.policies import Policy
from worldsize.data.images.crops import Crop, Draws, Pixels
from worldsize.data.loading.prepare import Preparation
from worldsize.data.samples import ArraySamples, Read, Samples
from worldsize.data.sampling.order import FullShuffle, Indices, Order, repeated
from worldsize.data.sampling.random_numbers import Use, uniforms
from worldsize.distributed.batch_plan import BatchPlan, evaluation_share
from worldsize.distributed.world import World
from worldsize.errors import DataError

if TYPE_CHECKING:
    from worldsize.distributed.device_timer import Stamp

log = logging.getLogger(__name__)

# Images per task. Threads wait for the GIL at each hand-over, and the training loop waits for the threads, so tasks are
# large; of small images, whose hand-over would take longer than they do, they have as many more as fit into
# `_TASK_PIXELS`. But if images are read one by one, close() waits for complete tasks, so these tasks are small.
_MIN_TASK, _MAX_TASK, _MOST_READ = 8, 32, 64
_TASK_PIXELS = _MIN_TASK * 128 * 128
_ORDER_CHUNK = 4096  # samples whose order is computed at once; for few samples, numpy takes ten times as long per sample

_MAX_TRIES = 100  # images to try as a replacement for a broken one


def blank_labels(samples: Samples, n: int, pin: bool = False) -> torch.Tensor:
    """Labels of ``n`` images of a split, to be filled: int64 (n,), or uint8 (n, classes) if images have several labels."""
    if samples.multilabel:
        return torch.zeros((n, len(samples.classes)), dtype=torch.uint8, pin_memory=pin)
    return torch.zeros(n, dtype=torch.int64, pin_memory=pin)


@dataclass(frozen=True)
class Batch:
    """``pixels``: uint8 (n, size, size, 3), in pinned memory for a GPU; ``labels``: see `blank_labels`.

    ``indices``: the sample at each place, after broken images are replaced, int64 (n,). ``mix``: float32 (n, 6), see
    `mixing`; None if images are not mixed. ``copied``: the time that a GPU waited for the copy of these tensors; None
    if it copied none.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    indices: Indices
    mix: torch.Tensor | None = None
    copied: tuple[Stamp, Stamp] | None = None


class BrokenImages:
    """The broken images of a split. Each one is logged once.

    ``known`` are those that all ranks know, ``new`` those that this rank found since the last `share`.
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
        self._log(index, reason)

    def share(self, world: World) -> None:
        """Exchange the new broken images between all ranks. A collective: every rank must call it."""
        own = self.take()
        for rank, new in enumerate(world.gather(own)):
            if rank != world.rank:
                self.merge(new, world.is_main)  # the main rank's log lists the broken images of all ranks

    def take(self) -> dict[int, str]:
        """What this rank found since the last call, with the reasons: a part of ``known`` from now on."""
        with self._lock:
            found, self.new = self.new, {}
            self.known |= found.keys()
        return found

    def merge(self, found: Mapping[int, str], logged: bool = True) -> None:
        """Add what another rank found, as its `take` returned it; ``logged``: also log what was unknown here."""
        with self._lock:
            unknown = found.keys() - self.known - self.new.keys()
            self.known |= found.keys()
            self.new = {index: reason for index, reason in self.new.items() if index not in found}
        for index in sorted(unknown if logged else ()):
            self._log(index, found[index])

    @property
    def count(self) -> int:
        """How many are known to this rank."""
        with self._lock:
            return len(self.known | self.new.keys())

    def _log(self, index: int, reason: str) -> None:
        log.warning("broken image %s: %s", printable(self._samples.name(index)), reason)


class Work:
    """Seconds that the decoding threads have spent so far, summed over threads: ``reading_s`` waiting for files or memory,
    ``decoding_s`` decoding, cropping and augmenting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reading_s = 0.0
        self.decoding_s = 0.0

    def add(self, reading_s: float, decoding_s: float) -> None:
        with self._lock:
            self.reading_s += reading_s
            self.decoding_s += decoding_s


@dataclass(frozen=True)
class Treatment:
    """What happens to the training images of an epoch: they are cropped, augmented and mixed."""

    crop: Crop
    policy: Policy | None = None
    mixing: Mixing | None = None


class Loader:
    """Batches of one split.

    Args:
        samples: the split.
        crop: how images are cropped for evaluation, and for training without ``treatment``.
        seed: the recipe's seed.
        workers: decoding threads.
        readers: reads in flight.
        prefetch: batches prepared ahead of time.
        pin: allocate batches in pinned memory, for a GPU.
        scaling: see `Preparation`.
        order: order of the samples in an epoch (default: a full shuffle).
        treatment: what happens to the training images of an epoch (0-based).
        fill: color of what rotations, shears and translations of the augmentation bring in.
        repeats: how often a step contains each of its images, each time with other draws.
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
        treatment: Callable[[int], Treatment] | None = None,
        fill: Color = (0, 0, 0),
        repeats: int = 1,
    ) -> None:
        self.samples = samples
        self.broken = BrokenImages(samples)
        self.work = Work()
        self._crop = crop
        self._treatment = treatment or (lambda _: Treatment(crop))
        self._seed = seed
        self._order = order or FullShuffle(seed, len(samples))
        self._fill_color = fill
        self._repeats = repeats
        self._prefetch = prefetch
        self._threads = max(readers, workers)
        self._pin = pin
        self._preparation = Preparation(scaling)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="read")

    def training(self, plan: BatchPlan, rank: int, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The images of this rank's forward passes of ``epoch``, from step ``first_step`` to the end of the epoch.

        A broken image is replaced by the next readable image of the split, with the draws of the broken one.
        """
        steps = range(first_step, plan.steps_per_epoch(len(self.samples)))
        return Stream(self._prefetch, self._parts(plan, rank, epoch, steps))

    def steps(self) -> Stream:
        """An empty stream, for `add_step`."""
        return Stream(self._prefetch, ())

    def add_step(self, stream: Stream, plan: BatchPlan, epoch: int, step: int) -> None:
        """Append the forward passes of one step of ``epoch`` to the stream, as for rank 0."""
        stream.add(self._parts(plan, 0, epoch, range(step, step + 1)))

    def _parts(self, plan: BatchPlan, rank: int, epoch: int, steps: range) -> Iterator[_Pending]:
        treatment = self._treatment(epoch)
        chunk = max(1, _ORDER_CHUNK // plan.per_process)
        for part in (steps[i : i + chunk] for i in range(0, len(steps), chunk)):
            firsts = np.array([plan.first(step, rank, 0) for step in part])
            positions = (firsts[:, None] + np.arange(plan.per_process)).reshape(-1)
            places, repeats = repeated(positions, plan.global_batch, self._repeats)
            indices = self._order(epoch, places)
            repeats += self._repeats * self._order.appearances(epoch, places)
            for start in range(0, len(positions), plan.forward_batch):
                own = slice(start, start + plan.forward_batch)
                mix = self._mix(treatment.mixing, epoch, plan, int(positions[start]))
                yield self._submit(treatment, indices[own], epoch, repeats[own], replace=True, mix=mix)

    def evaluation(self, rank: int, world_size: int, batch: int, crop: Crop | None = None) -> Iterator[Batch]:
        """This rank's part of the split in order, every sample once. Broken images are skipped.

        Batch i has the samples ``i * batch`` and following, at every world size; a rank gets complete batches.
        """
        own = evaluation_share(len(self.samples), rank, world_size, batch)
        starts = range(own.start, own.stop, batch)
        requests = (np.arange(start, min(start + batch, own.stop)) for start in starts)
        centered, once = Treatment(crop or self._crop), np.zeros(1, np.int64)
        return Stream(self._prefetch, (self._submit(centered, indices, 0, once, replace=False) for indices in requests))

    def close(self) -> None:
        """Stop the threads. Tasks that have not started are cancelled."""
        # The readers first: the decoding threads wait for them.
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(
        self,
        treatment: Treatment,
        indices: Indices,
        epoch: int,
        repeats: Indices,
        *,
        replace: bool,
        mix: torch.Tensor | None = None,
    ) -> _Pending:
        crop, size = treatment.crop, treatment.crop.size
        pixels = torch.empty((len(indices), size, size, 3), dtype=torch.uint8, pin_memory=self._pin)
        labels = blank_labels(self.samples, len(indices), self._pin)
        draws = self._draws(crop, epoch, indices, repeats)
        program = self._program(treatment.policy, indices, epoch, repeats)
        indices = indices.copy()  # `_replace` changes it
        places = Places(crop, indices, draws, program, pixels.numpy(), labels.numpy())
        chunk = self._chunk(len(indices), crop)
        tasks = []
        for part in (places.part(slice(i, i + chunk)) for i in range(0, len(indices), chunk)):
            tasks.append(self._pool.submit(self._fill, part, self._read(part.indices), replace))
        return _Pending(pixels, labels, indices, mix, tasks)

    def _read(self, indices: Indices) -> Callable[[], list[Read] | Pixels]:
        """Start to read these images; the result waits for them. Images in memory need no thread to wait for."""
        if isinstance(self.samples, ArraySamples):
            return partial(self.samples.several, indices)
        return self._readers.submit(self.samples.several, indices).result

    def _draws(self, crop: Crop, epoch: int, indices: Indices, repeats: Indices) -> Draws:
        draws = uniforms(self._seed, Use.AUGMENT, epoch, indices, crop.draws, repeats)
        if crop.alternates:
            first = uniforms(self._seed, Use.AUGMENT, 0, indices, 1, repeats)[:, 0]
            draws[:, 0] = (first + epoch % 2 / 2) % 1
        return draws

    def _mix(self, mixing: Mixing | None, epoch: int, plan: BatchPlan, first: int) -> torch.Tensor | None:
        """The mix of a forward pass that starts with the sample at position ``first`` of the epoch."""
        if mixing is None:
            return None
        mix = torch.from_numpy(mixing(epoch, first // plan.micro_batch, plan.forward_batch // plan.micro_batch))
        return mix.pin_memory() if self._pin else mix

    def _program(self, policy: Policy | None, indices: Indices, epoch: int, repeats: Indices) -> Program | None:
        if policy is None:
            return None
        return policy.program(uniforms(self._seed, Use.POLICY, epoch, indices, policy.draws, repeats))

    def _augment(self, places: Places) -> None:
        if places.program is not None:
            apply.apply(places.pixels, places.program, self._fill_color)

    def _chunk(self, batch: int, crop: Crop) -> int:
        """Images per task, so that the batches in preparation have two tasks per thread."""
        fair = batch * (self._prefetch + 1) // (2 * self._threads)
        worthwhile = max(_MIN_TASK, _TASK_PIXELS // crop.size**2)
        if self.samples.reads_many:
            return max(worthwhile, min(fair, _MAX_TASK))
        return max(_MIN_TASK, min(fair, worthwhile, _MOST_READ))

    def _fill(self, places: Places, read: Callable[[], list[Read] | Pixels], replace: bool) -> list[bool]:
        """Read, crop and augment these images. Returns which places were filled."""
        places.labels[:] = self.samples.labels[places.indices]
        begin = time.perf_counter()
        images = read()
        read_at = time.perf_counter()
        reasons = self._preparation.fill(places.crop, images, places.draws, places.pixels)
        for i, reason in enumerate(reasons):
            if reason is not None:
                self.broken.add(int(places.indices[i]), reason)
        filled = [
            reason is None or (replace and self._replace(places.part(slice(i, i + 1)))) for i, reason in enumerate(reasons)
        ]
        self._augment(places)
        self.work.add(read_at - begin, time.perf_counter() - read_at)
        return filled

    def _replace(self, place: Places) -> bool:
        """Fill the place of a broken image with the next readable one, cropped with the draws of the broken one."""
        n = len(self.samples)
        tries = min(n, _MAX_TRIES)
        for offset in range(1, tries):
            candidate = (place.indices + offset) % n
            (reason,) = self._preparation.fill(place.crop, self.samples.several(candidate), place.draws, place.pixels)
            if reason is None:
                place.labels[:] = self.samples.labels[candidate]
                place.indices[:] = candidate
                return True
            self.broken.add(int(candidate[0]), reason)
        first = self.samples.name(int(place.indices[0]))
        raise DataError(f"{tries} consecutive images are broken, starting at {first}; run `worldsize data verify`")


@dataclass(frozen=True)
class Places:
    """Places in a batch: the n samples to put there, and how to crop and augment them."""

    crop: Crop
    indices: Indices
    draws: Draws
    program: Program | None
    pixels: Pixels
    labels: NDArray[np.int64] | NDArray[np.uint8]

    def part(self, which: slice) -> Places:
        """Select some of the places."""
        program = None if self.program is None else self.program[which]
        return Places(self.crop, self.indices[which], self.draws[which], program, self.pixels[which], self.labels[which])


class Stream(Iterator[Batch]):
    """Batches in order. ``prefetch`` batches are prepared while one is used. Each item of ``source`` starts one."""

    def __init__(self, prefetch: int, source: Iterable[_Pending]) -> None:
        self._prefetch = prefetch
        self._sources = deque([iter(source)])
        self._started: deque[_Pending] = deque()

    def add(self, source: Iterable[_Pending]) -> None:
        """Append more batches."""
        self._sources.append(iter(source))

    def __next__(self) -> Batch:
        while self._sources and len(self._started) <= self._prefetch:
            pending = next(self._sources[0], None)
            if pending is None:
                self._sources.popleft()
            else:
                self._started.append(pending)
        if not self._started:
            raise StopIteration
        return self._started.popleft().result()


@dataclass(frozen=True)
class _Pending:
    """A batch that threads are still filling."""

    pixels: torch.Tensor
    labels: torch.Tensor
    indices: Indices
    mix: torch.Tensor | None
    parts: list[Future[list[bool]]]

    def result(self) -> Batch:
        filled = [ok for part in self.parts for ok in part.result()]
        if all(filled):
            return Batch(self.pixels, self.labels, self.indices, self.mix)
        keep = torch.tensor(filled)
        return Batch(self.pixels[keep], self.labels[keep], self.indices[keep.numpy()])
