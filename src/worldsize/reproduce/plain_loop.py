"""The same steps in a plain PyTorch loop of one process: no strategy, no data parallelism, no code of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from worldsize.config.recipe import Recipe
from worldsize.data import open_dataset
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.build import train_loader
from worldsize.data.loading.loader import Batch
from worldsize.data.sampling.random_numbers import Use, seed_of
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import join
from worldsize.models import freezing, pretrained
from worldsize.models.networks import from_file
from worldsize.optim import clipping, optimizers, schedules
from worldsize.training import new_network, precision, supervision
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision


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
    world = join(RankInfo("none", 0, 1, 0, 1), recipe, threads)
    dataset = open_dataset(recipe.data, cache)
    plan = batch_plan.plan(recipe, 1)
    number_format = precision.resolve(recipe, world.device)
    number_format.apply()
    network = new_network.build(recipe, len(dataset.classes), number_format)
    if recipe.model.weights is not None:
        pretrained.load(network, recipe)
    normalise = Normalise(recipe.data, world.device, number_format.weights, recipe.model.channels_last)
    aims = supervision.build(recipe, dataset, supervision.teacher_checkpoint(recipe), number_format)
    objective = Objective(network, normalise, number_format, recipe, aims.class_weights, aims.teacher)
    peak = schedules.peak_lr(recipe.optimizer, plan.global_batch)
    optimizer = optimizers.build(network, recipe.optimizer, world.device, peak=peak)
    loop = _Loop(recipe, network, optimizer, number_format, objective, number_format.scaler())
    loader = train_loader(recipe, dataset.train, plan, world)
    per_epoch = plan.steps_per_epoch(len(dataset.train))
    losses: list[float] = []
    try:
        while len(losses) < steps:
            if recipe.model.unfreeze_epoch is not None and len(losses) == recipe.model.unfreeze_epoch * per_epoch:
                freezing.unfreeze(network)
                optimizers.add_parameters(optimizer, network, recipe.optimizer)
            batches = loader.training(plan, 0, len(losses) // per_epoch)
            for step in range(len(losses), min(steps, len(losses) + per_epoch)):
                optimizers.set_lr(loop.optimizer, peak * schedules.factor(recipe.schedule, step, per_epoch, recipe.epochs))
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
    objective: Objective
    scaler: GradScaler

    def step(self, step: int, micro_batches: list[Batch]) -> float:
        """One optimizer step with plain gradient accumulation; returns the mean loss."""
        recipe = self.recipe
        total = self._accumulate(step, micro_batches)
        if recipe.optimizer.sam_rho and step % recipe.optimizer.sam_every == 0:
            self._sharpen(step, micro_batches)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in self.network.parameters() if p.grad is not None])
        clipping.clip(self.network, recipe.optimizer, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return total

    def _accumulate(self, step: int, micro_batches: list[Batch]) -> float:
        """Add the gradients of the micro-batches; returns their mean loss."""
        n, total = len(micro_batches), 0.0
        for i, images in enumerate(micro_batches):
            seed = seed_of(self.recipe.seed, Use.TORCH, step, i)
            torch.manual_seed(seed)  # dropout
            from_file.seed(seed)
            losses, _ = self.objective(images.pixels, images.labels.to(self.number_format.device), images.mix)
            loss = losses.mean()
            self.scaler.scale(loss / n).backward()
            total += loss.item() / n
        return total

    def _sharpen(self, step: int, micro_batches: list[Batch]) -> None:
        """Sharpness-aware minimization, parameter by parameter."""
        parameters = [p for p in self.network.parameters() if p.grad is not None]
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        norm = torch.sqrt(sum((g.double().square().sum() for g in gradients), torch.zeros((), dtype=torch.float64)))
        moves = [self.recipe.optimizer.sam_rho * g / norm.to(g.dtype) for g in gradients]
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        self.optimizer.zero_grad()
        self._accumulate(step, micro_batches)
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
