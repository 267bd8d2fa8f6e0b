"""Whether threads that decode slow the trainer's own thread, which launches kernels: against a process that decodes.

    python benchmarks/launches.py SHARDS [ROUNDS]

SHARDS is a folder that `worldsize data pack` made. On one core a ResNet-50 is trained that is so thin, on pictures so small,
that a step is hardly more than the launching of its kernels. On another the loader decodes as fast as it can: not at all, in
threads of the same process, from which a batch is taken after each step if one is ready, or in a process of its own, which
drops its batches, as if handing them over cost nothing. They take turns in every round. Prints a table in markdown.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
from torchvision.models.resnet import Bottleneck, ResNet

from worldsize.batch import BatchPlan
from worldsize.data import shards
from worldsize.data.crops import RandomResizedCrop
from worldsize.data.loader import Loader, Stream
from worldsize.data.shards.store import Local
from worldsize.world import _keep_freed_memory

BATCH, SECONDS, LAUNCHING, DECODING = 128, 5.0, 0, 1


class Decoding:
    """Batches without end, decoded by threads on one core."""

    def __init__(self, folder: str) -> None:
        samples = shards.open_dataset(Local(Path(folder))).train
        crop = RandomResizedCrop(224, True, (0.08, 1.0), (3 / 4, 4 / 3))
        self._loader = Loader(samples, crop, seed=0, workers=1, prefetch=4, pin=False)
        plan = BatchPlan(BATCH, BATCH, 1)
        steps = range(plan.steps_per_epoch(len(samples)))
        # One stream over all epochs: an epoch's end would show in a set as small as this.
        parts = (part for epoch in count() for part in self._loader._parts(plan, 0, epoch, steps))
        self._stream = Stream(4, parts)
        self.pictures = 0
        os.sched_setaffinity(0, {DECODING})
        for _ in range(4):
            self.take()  # threads begin with the first batches, and inherit the core
        os.sched_setaffinity(0, {LAUNCHING})

    def take(self) -> None:
        """Wait for a batch."""
        self.pictures += len(next(self._stream).labels)

    def take_ready(self) -> None:
        """Take a batch if one is there."""
        if all(part.done() for part in self._stream._begun[0].parts):
            self.take()

    def close(self) -> None:
        self._loader.close()


def decode(folder: str, pictures: Synchronized) -> None:
    """What the process of its own does, until it is killed."""
    decoding = Decoding(folder)
    os.sched_setaffinity(0, {DECODING})
    while True:
        decoding.take()
        pictures.value = decoding.pictures


def training() -> Callable[[], None]:
    """A function that launches one training step."""
    model, pixels, labels = ResNet(Bottleneck, [3, 4, 6, 3], width_per_group=1), torch.randn(2, 3, 32, 32), torch.arange(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()

    return step


def speed(step: Callable[[], None], taken: Callable[[], int]) -> tuple[float, float]:
    """(steps/s, images/s)."""
    steps, before, begun = 0, taken(), time.perf_counter()
    while (took := time.perf_counter() - begun) < SECONDS:
        step()
        steps += 1
    return steps / took, (taken() - before) / took


def beside_threads(folder: str, step: Callable[[], None]) -> tuple[float, float]:
    decoding = Decoding(folder)

    def both() -> None:
        step()
        decoding.take_ready()

    measured = speed(both, lambda: decoding.pictures)
    decoding.close()
    return measured


def beside_process(folder: str, step: Callable[[], None]) -> tuple[float, float]:
    spawned = multiprocessing.get_context("spawn")
    pictures = spawned.Value("q", 0)
    process = spawned.Process(target=decode, args=(folder, pictures))
    process.start()
    while pictures.value < 4 * BATCH:
        time.sleep(0.01)
    measured = speed(step, lambda: pictures.value)
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
    ways = {
        "nowhere": lambda: speed(step, int),
        "in threads": lambda: beside_threads(folder, step),
        "in a process": lambda: beside_process(folder, step),
    }
    measured = [{way: run() for way, run in ways.items()} for _ in range(rounds)]
    print("| decoding | images/s | steps/s | of those alone |\n| --- | ---: | ---: | ---: |")
    for way in ways:
        steps, images = (statistics.median(one[way][i] for one in measured) for i in (0, 1))
        ratio = statistics.median(one[way][0] / one["nowhere"][0] for one in measured)
        print(f"| {way} | {images:,.0f} | {steps:.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
