"""Measures how much decoding slows down a launch-bound training loop: decoding threads against a decoding process.

    python benchmarks/launches.py DATA [ROUNDS]

DATA is a folder of images, or one written by `worldsize data pack`. One core trains a ResNet-50 that is so narrow, on
images so small, that a step is little more than launching kernels. Another core decodes as fast as possible, in one of these
ways: not at all; in threads of the same process, with a batch taken after each step if one is ready; in a separate process
that discards its batches, as if their transfer were free; if DATA is a folder of images, also in threads that read its files
one by one. The ways are interleaved in every round. Prints a table in Markdown.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
from torchvision.models.resnet import Bottleneck, ResNet

from worldsize.data import open_layout
from worldsize.data.file_samples import FileSamples
from worldsize.data.images.crops import RandomResizedCrop
from worldsize.data.loading.loader import Loader, Stream
from worldsize.data.samples import EncodedSamples, Samples
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.world import _keep_freed_memory

BATCH, SECONDS, LAUNCHING, DECODING = 128, 5.0, 0, 1


def opened(folder: str) -> Samples:
    """The training images."""
    with tempfile.TemporaryDirectory() as cache:
        return open_layout(Path(folder), None, Path(cache)).train


class Decoding:
    """An endless stream of batches, decoded by threads on one core."""

    def __init__(self, folder: str, one_by_one: bool = False) -> None:
        samples = opened(folder)
        if one_by_one:
            samples.several = partial(EncodedSamples.several, samples)
        crop = RandomResizedCrop(224, True, (0.08, 1.0), (3 / 4, 4 / 3))
        self._loader = Loader(samples, crop, seed=0, workers=1, prefetch=4, pin=False)
        plan = BatchPlan(BATCH, BATCH, 1)
        steps = range(plan.steps_per_epoch(len(samples)))
        # One stream over all epochs: in a small dataset, the ends of epochs would affect the result.
        parts = (part for epoch in count() for part in self._loader._parts(plan, 0, epoch, steps))
        self._stream = Stream(4, parts)
        self.images = 0
        os.sched_setaffinity(0, {DECODING})
        for _ in range(4):
            self.take()  # threads start with the first batches and inherit the affinity
        os.sched_setaffinity(0, {LAUNCHING})

    def take(self) -> None:
        """Wait for a batch."""
        self.images += len(next(self._stream).labels)

    def take_ready(self) -> None:
        """Take a batch if one is ready."""
        if all(part.done() for part in self._stream._started[0].parts):
            self.take()

    def close(self) -> None:
        self._loader.close()


def decode(folder: str, images: Synchronized) -> None:
    """Body of the decoding process; runs until it is killed."""
    decoding = Decoding(folder)
    os.sched_setaffinity(0, {DECODING})
    while True:
        decoding.take()
        images.value = decoding.images


def training() -> Callable[[], None]:
    """Return a function that runs one training step."""
    model, pixels, labels = ResNet(Bottleneck, [3, 4, 6, 3], width_per_group=1), torch.randn(2, 3, 32, 32), torch.arange(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()

    return step


def speed(step: Callable[[], None], decoded: Callable[[], int]) -> tuple[float, float]:
    """(steps/s, images/s)."""
    steps, before, start = 0, decoded(), time.perf_counter()
    while (took := time.perf_counter() - start) < SECONDS:
        step()
        steps += 1
    return steps / took, (decoded() - before) / took


def with_threads(folder: str, step: Callable[[], None], one_by_one: bool = False) -> tuple[float, float]:
    decoding = Decoding(folder, one_by_one)

    def step_and_take() -> None:
        step()
        decoding.take_ready()

    measured = speed(step_and_take, lambda: decoding.images)
    decoding.close()
    return measured


def with_process(folder: str, step: Callable[[], None]) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    images = context.Value("q", 0)
    process = context.Process(target=decode, args=(folder, images))
    process.start()
    while images.value < 4 * BATCH:
        time.sleep(0.01)
    measured = speed(step, lambda: images.value)
    process.kill()
    process.join()
    return measured


def main() -> None:
    folder, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7
    torch.set_num_threads(1)
    _keep_freed_memory()  # as training on a CPU does
    os.sched_setaffinity(0, {LAUNCHING})
    step = training()
    speed(step, int)
    modes = {
        "none": lambda: speed(step, int),
        "in threads": lambda: with_threads(folder, step),
        "in a process": lambda: with_process(folder, step),
    }
    if isinstance(opened(folder), FileSamples):
        modes["in threads, files one by one"] = lambda: with_threads(folder, step, one_by_one=True)
    measured = [{mode: run() for mode, run in modes.items()} for _ in range(rounds)]
    print("| decoding | images/s | steps/s | relative to no decoding |\n| --- | ---: | ---: | ---: |")
    for mode in modes:
        steps, images = (statistics.median(one[mode][i] for one in measured) for i in (0, 1))
        ratio = statistics.median(one[mode][0] / one["none"][0] for one in measured)
        print(f"| {mode} | {images:,.0f} | {steps:.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
