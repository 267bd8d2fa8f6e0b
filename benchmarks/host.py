"""The host's time for a training step outside of the network: steps of a network of one layer, next to a bare loop of it.

    python benchmarks/host.py [--steps 300]

The target is 0.3 ms (and 1 µs per rank, see ranks.py). On a GPU, only launching is timed, not waiting for the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from worldsize.config.recipe import Recipe
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import join
from worldsize.optim import optimizers
from worldsize.training import build
from worldsize.training.gradients import GradientComputer, StepHooks
from worldsize.training.margins import Margins
from worldsize.training.precision import Precision
from worldsize.training.rank_decisions import RankDecisions
from worldsize.training.step import StepRunner
from worldsize.training.step_metrics import StepMetrics

IMAGES, SIZE, CLASSES, ROUNDS = 8, 8, 10, 7


def tiny(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES)).to(device)


def batches(device: torch.device) -> Iterator[Batch]:
    """The same images again and again, as the loader delivers them."""
    pixels = torch.zeros(IMAGES, SIZE, SIZE, 3, dtype=torch.uint8)
    labels = torch.zeros(IMAGES, dtype=torch.int64)
    if device.type == "cuda":
        pixels, labels = pixels.pin_memory(), labels.pin_memory()
    while True:
        yield Batch(pixels, labels, np.arange(IMAGES))


def product(recipe: Recipe) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of `train.Trainer`, and what it does from time to time: report the metrics."""
    world = join(RankInfo("none", 0, 1, 0, 1), recipe)
    plan = batch_plan.plan(recipe, 1)
    state = build.build_state(recipe, tiny(world.device), plan, world, Precision("fp32", world.device), 100)
    state = replace(state, margins=Margins(IMAGES))
    runner, control = StepRunner(GradientComputer(recipe, plan, 0, world.device, state)), RankDecisions(world)
    meter, feed = StepMetrics(world, plan, state.strategy), Feed(batches(world.device), world.device)

    def propose() -> None:
        control.propose(False, False, False, 0)

    def step() -> None:
        meter.begin()
        computed, norm = runner.run(feed, 0, 0.1, StepHooks(propose, feed.prefetch))
        state.margins.add(computed.answers)
        meter.add(1, 0.0, 0.1, computed, norm)
        control.decide()

    def collect() -> None:
        meter.collect(0)
        state.margins.merge(world)

    return step, collect


def bare(recipe: Recipe) -> tuple[Callable[[], None], Callable[[], None]]:
    """The network's own step on constant tensors."""
    device = join(RankInfo("none", 0, 1, 0, 1), recipe).device
    network = tiny(device)
    optimizer = optimizers.build(network, recipe.optimizer, device)
    images, labels = torch.zeros(IMAGES, 3, SIZE, SIZE, device=device), torch.zeros(IMAGES, dtype=torch.int64, device=device)

    def step() -> None:
        functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, torch.cuda.synchronize if device.type == "cuda" else lambda: None


def milliseconds(work: tuple[Callable[[], None], Callable[[], None]], steps: int) -> float:
    step, rest = work
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    spent = (time.perf_counter() - begin) / steps * 1000
    rest()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps per round (300)")
    steps = parser.parse_args().steps
    values = {"global_batch": IMAGES, "micro_batch": IMAGES, "precision": "fp32", "model": {"compile": False}}
    recipe = Recipe.model_validate(values)
    ours, theirs = product(recipe), bare(recipe)
    # In turns, so that load of the machine affects both; the first round warms up.
    rounds = [(milliseconds(ours, steps), milliseconds(theirs, steps)) for _ in range(ROUNDS)][1:]
    own, other = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(f"a step {own:.3f} ms, bare {other:.3f} ms: {own - other:.3f} ms outside of the network (target 0.3)")


if __name__ == "__main__":
    main()
