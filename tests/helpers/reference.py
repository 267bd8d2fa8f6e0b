"""A recipe in plain PyTorch: any number of replicas in one process; from worldsize it uses only data and random numbers.

The caller implements what ranks exchange, on NumPy arrays that share memory with the replicas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torchvision
from torch import nn

import small_network
from paths import SMALL_NETWORK
from worldsize.config.recipe import Data
from worldsize.data.datasets.digits import open_dataset
from worldsize.data.images.crops import PadCrop
from worldsize.data.samples import Dataset
from worldsize.data.sampling.order import permute
from worldsize.data.sampling.random_numbers import Use, seed_of, uniforms

# Covers warmup, accumulation, random crops and flips; mobilenet has dropout in addition to BatchNorm. The small learning
# rate keeps the models from amplifying rounding: at four times this rate, float64 differed by 1e-9 after 20 steps.
RECIPE = """
base: digits
epochs: 2
max_steps: 12
global_batch: 48
micro_batch: 12
precision: {precision}
device: cpu
data: {{flip: true, max_broken: 0}}
model: {{name: {model}}}
optimizer: {{lr: 0.0005, lr_reference_batch: 48}}
schedule: {{warmup_epochs: 0.25}}
"""
MICROS, MICRO = 4, 12
STEPS_PER_EPOCH = 1437 // 48

Arrays = dict[str, np.ndarray]


class Replica:
    """One rank's model in float64, with its own momentum and running statistics."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = _network(name)
        for block in self.model.modules():
            if isinstance(block, torchvision.models.resnet.BasicBlock):
                nn.init.zeros_(block.bn2.weight)
        self.model.double()
        self._norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)]
        self._momenta = [norm.momentum for norm in self._norms]
        for norm in self._norms:
            norm.momentum = 1.0  # makes the running buffers contain the last batch's statistics
        self._averages = [(torch.zeros(m.num_features).double(), torch.ones(m.num_features).double()) for m in self._norms]
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self._optimizer = torch.optim.SGD(
            [{"params": decayed, "weight_decay": 5e-4}, {"params": others}], lr=0.1, momentum=0.9, nesterov=True
        )
        self.before: Arrays = {}

    def gradient(self, step: int, micros: range) -> float:
        """Compute the mean gradient of these micro-batches of the step into the parameters; returns the mean loss."""
        total, statistics = 0.0, []
        for micro in micros:
            x, y = _micro_batch(step, micro)
            torch.manual_seed(seed_of(0, Use.TORCH, step, micro))  # dropout
            loss = nn.functional.cross_entropy(self.model(x), y, label_smoothing=0.1)
            (loss / len(micros)).backward()
            total += loss.item() / len(micros)
            statistics.append([(m.running_mean.clone(), m.running_var.clone()) for m in self._norms])
        for i, (averages, momentum) in enumerate(zip(self._averages, self._momenta, strict=True)):
            for kind, average in enumerate(averages):
                average.mul_(1 - momentum).add_(sum(s[i][kind] for s in statistics) / len(micros), alpha=momentum)
        return total

    def step(self, lr: float) -> None:
        """Step the optimizer; `before` stores the weights before the step."""
        self.before = {name: array.copy() for name, array in self.weights().items()}
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> Arrays:
        return {name: p.detach().numpy() for name, p in self.model.named_parameters()}

    def gradients(self) -> Arrays:
        return {name: p.grad.numpy() for name, p in self.model.named_parameters()}

    def momentum(self) -> Arrays:
        state = self._optimizer.state
        return {f"momentum_buffer/{name}": state[p]["momentum_buffer"].numpy() for name, p in self.model.named_parameters()}

    def state_dict(self, steps: int) -> dict[str, torch.Tensor]:
        for norm, (mean, var) in zip(self._norms, self._averages, strict=True):
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(var)
            norm.num_batches_tracked.fill_(steps)
        return self.model.state_dict()


Exchange = Callable[[int, Sequence[Replica]], None]


def train(
    steps: int,
    model: str = "resnet18",
    size: int = 1,
    rate: float = 1.0,
    on_gradients: Exchange = lambda step, replicas: None,
    on_weights: Exchange = lambda step, replicas: None,
) -> tuple[list[float], list[Replica]]:
    """``steps`` steps of ``RECIPE`` with ``size`` replicas at ``rate`` times its learning rate.

    ``on_gradients`` is called between the backward pass and the optimizer step, ``on_weights`` after it.

    Returns:
        The loss of each step; the replicas.
    """
    replicas = [Replica(model) for _ in range(size)]
    share = MICROS // size
    losses = []
    for step in range(steps):
        parts = [replica.gradient(step, range(rank * share, (rank + 1) * share)) for rank, replica in enumerate(replicas)]
        losses.append(sum(parts) / size)
        on_gradients(step, replicas)
        for replica in replicas:
            replica.step(rate * _lr(step))
        on_weights(step, replicas)
    return losses, replicas


def average(arrays: Sequence[Arrays]) -> None:
    """Replace the arrays by their mean over ranks, in place."""
    for name in arrays[0]:
        mean = np.mean([own[name] for own in arrays], axis=0)
        for own in arrays:
            own[name][...] = mean


def mean_state(replicas: Sequence[Replica], steps: int) -> dict[str, torch.Tensor]:
    """The mean of the replicas' weights and running statistics."""
    states = [replica.state_dict(steps) for replica in replicas]
    return {k: torch.stack([s[k] for s in states]).double().mean(0).to(states[0][k].dtype) for k in states[0]}


def validation_loss(name: str, state: dict[str, torch.Tensor]) -> float:
    """The mean cross-entropy on the digits validation set of a model with this state."""
    model = _network(name).double().eval()
    model.load_state_dict(state)
    with torch.inference_mode():
        logits = model(_normalized(_digits().val.pixels))
        return nn.functional.cross_entropy(logits, torch.from_numpy(_digits().val.labels).long()).item()


def _network(name: str) -> nn.Module:
    """A network of torchvision, or `SMALL_NETWORK`."""
    return small_network.residual(10) if name == SMALL_NETWORK else torchvision.models.get_model(name, num_classes=10)


@functools.cache
def _digits() -> Dataset:
    data = Data(name="digits", train_crop="pad", train_crop_size=32, val_resize_size=32, val_crop_size=32)
    return open_dataset(data, Path())


def _micro_batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    train, crop = _digits().train, PadCrop(32, flip=True, padding=2)
    epoch, first = step // STEPS_PER_EPOCH, step % STEPS_PER_EPOCH * MICROS * MICRO + micro * MICRO
    chosen = permute(0, epoch, np.arange(first, first + MICRO), len(train))
    pixels = crop.batch(train.pixels[chosen], uniforms(0, Use.AUGMENT, epoch, chosen, crop.draws))
    return _normalized(pixels), torch.from_numpy(train.labels[chosen]).long()


def _normalized(pixels: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2).double() / 255 - 0.305) / 0.376


def _lr(step: int) -> float:
    total, warmup = 2 * STEPS_PER_EPOCH, 0.25 * STEPS_PER_EPOCH
    progress = (step - warmup) / (total - warmup)
    return 0.0005 * (step / warmup if step < warmup else (1 + math.cos(math.pi * progress)) / 2)
