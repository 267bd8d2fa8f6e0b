"""Throughput of `worldsize predict` next to that of the loader alone: ``python benchmarks/predict.py FOLDER [ROUNDS]``.

FOLDER contains images, in folders or not, at least a few hundred. These take turns on the same images: `worldsize bench
loader` (random resized crops of 224 pixels), the loader with the evaluation's crops, and everything that predict does after
opening the network and before writing. The network is one linear layer on the mean color. Normalization and network share
the processor with the loader here; "computing elsewhere" leaves them out, as on a GPU. Prints a Markdown table.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from worldsize.bench.loader import BenchLoader, Ours
from worldsize.config.recipe import Data, Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.build import val_loader
from worldsize.distributed.rank import discover_rank_info
from worldsize.distributed.world import World, join
from worldsize.inference.predict import images
from worldsize.inference.predict.command import Predict, _rows
from worldsize.inference.trained import Trained
from worldsize.training.precision import Precision

CLASSES = tuple(map(str, range(1000)))
BATCH = 64
PREDICT = "predict, computing elsewhere"


def main(folder: str, rounds: int) -> None:
    recipe = Recipe(data=Data(name="folder"), global_batch=BATCH, micro_batch=BATCH, device="cpu", precision="fp32")
    world = join(discover_rank_info(), recipe, 1)
    samples = images.find([folder], CLASSES)
    training = Ours(samples, recipe, BenchLoader(root=(), batch=BATCH))
    evaluation = val_loader(recipe, samples, world)
    normalise = Normalise(recipe.data, world.device, torch.float32)
    passes: dict[str, Callable[[], int]] = {
        "bench loader": lambda: sum(training.batches()),
        "loader, evaluation crops": lambda: sum(len(b.labels) for b in evaluation.evaluation(0, 1, BATCH)),
        PREDICT: lambda: predicted(recipe, samples, world, Elsewhere()),
        "predict, computing on the CPU": lambda: predicted(recipe, samples, world, normalise),
    }
    speeds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(rounds + 1):  # round 0 is not counted: it fills the page cache
        for name, work in passes.items():
            begin = time.perf_counter()
            count = work()
            if turn:
                speeds[name].append(count / (time.perf_counter() - begin))
    print(f"{len(samples):,} images, {rounds} rounds\n")
    print(f"| | images/s, median | {PREDICT} / this |\n| --- | ---: | ---: |")
    for name, own in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(speeds[PREDICT], own, strict=True))
        print(f"| {name} | {statistics.median(own):,.0f} | {'' if name == PREDICT else f'{ratio:.2f}'} |")


class Elsewhere(nn.Module):
    """Instead of normalization: one pixel of each image."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels[:, :1, :1].permute(0, 3, 1, 2).float()


def predicted(recipe: Recipe, samples: images.Images, world: World, normalise: nn.Module) -> int:
    """The number of rows of one prediction, with a loader of its own as in the command."""
    precision = Precision("fp32", torch.device("cpu"))
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, len(CLASSES))).eval()
    found = Trained(recipe, CLASSES, network, normalise, precision)  # type: ignore[arg-type]
    loader = val_loader(recipe, samples, world)
    try:
        return len(_rows(found, loader, world, Predict(recipe), stop=False))  # type: ignore[arg-type]
    finally:
        loader.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
