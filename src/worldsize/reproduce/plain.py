"""The same steps in a plain PyTorch loop of one process: no strategy, no data parallelism, no code of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from worldsize import batch, model, optim, precision, schedule
from worldsize.data import open_dataset
from worldsize.data.loader import Batch
from worldsize.data.pixels import Normalise
from worldsize.data.rng import Use, seed_of
from worldsize.loaders import train_loader
from worldsize.place import Place
from worldsize.precision import Precision
from worldsize.recipe import Recipe
from worldsize.world import join


@dataclass(frozen=True)
class PlainSteps:
    """The mean loss of each step, and the trained parameters (without running statistics) after the last one."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]


def train(recipe: Recipe, cache: Path, steps: int, threads: int) -> PlainSteps:
    """Train the first steps of the recipe, on the CPU with ``threads`` threads or on the first GPU.

    Args:
        cache: where listings of the dataset are cached.
    """
    world = join(Place("none", 0, 1, 0, 1), recipe, threads)
    dataset = open_dataset(recipe.data, cache)
    plan = batch.plan(recipe, 1)
    number_format = precision.resolve(recipe, world.device)
    number_format.apply()
    network = model.build(recipe, len(dataset.classes), world.device, number_format.weights)
    normalise = Normalise(recipe.data, world.device, number_format.weights)
    loop = _Loop(recipe, network, optim.build(network, recipe.optimizer, world.device), number_format, normalise)
    loader = train_loader(recipe, dataset.train, plan, world)
    per_epoch = plan.steps_per_epoch(len(dataset.train))
    peak = schedule.peak_lr(recipe.optimizer, plan.global_batch)
    losses: list[float] = []
    try:
        while len(losses) < steps:
            batches = loader.training(plan, 0, len(losses) // per_epoch)
            for step in range(len(losses), min(steps, len(losses) + per_epoch)):
                optim.set_lr(loop.optimizer, peak * schedule.factor(recipe.schedule, step, per_epoch, recipe.epochs))
                losses.append(loop.step(step, [next(batches) for _ in range(plan.accumulation)]))
    finally:
        loader.close()
    return PlainSteps(losses, {name: p.detach().cpu() for name, p in network.named_parameters()})


@dataclass(frozen=True)
class _Loop:
    recipe: Recipe
    network: nn.Module
    optimizer: torch.optim.Optimizer
    number_format: Precision
    normalise: Normalise

    def step(self, step: int, micro_batches: list[Batch]) -> float:
        """One optimizer step with plain gradient accumulation; returns the mean loss."""
        recipe, n, total = self.recipe, len(micro_batches), 0.0
        scaler = self.number_format.scaler()  # a few steps: its initial scale is enough
        for i, images in enumerate(micro_batches):
            torch.manual_seed(seed_of(recipe.seed, Use.TORCH, step, i))  # dropout
            with self.number_format.autocast():
                logits = self.network(self.normalise(images.pixels))
                labels = images.labels.to(logits.device)
                loss = functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
            scaler.scale(loss / n).backward()
            total += loss.item() / n
        scaler.unscale_(self.optimizer)
        if recipe.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), recipe.optimizer.clip_norm)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        return total
