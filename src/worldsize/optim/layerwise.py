"""Optimizers that scale the learning rate of each layer, for large batches: LARS and LAMB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from worldsize.optim.moments import AdamMoments, kept, with_gradients


class Lars(torch.optim.Optimizer):
    """SGD with momentum whose learning rate is multiplied, per layer, by trust * |w| / (|g| + weight_decay * |w|).

    You et al. 2017, "Large batch training of convolutional networks" (arXiv 1708.03888), algorithm 1: the momentum contains
    the learning rate. Groups with ``adapt`` False (norm layers, biases) use the plain learning rate, as MLPerf's reference
    does.
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float, trust: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0, "adapt": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights, gradients = with_gradients(group)
            if not weights:
                continue
            decay = group["weight_decay"]
            rates: list[Any] = [group["lr"]] * len(weights)
            if group["adapt"]:
                sizes, slopes = _norms(weights), _norms(gradients)
                rates = list((group["lr"] * _ratio(group["trust"] * sizes, slopes + decay * sizes)).unbind())
            buffers = [kept(self, p, "momentum_buffer") for p in weights]
            updates = torch._foreach_add(gradients, weights, alpha=decay)
            torch._foreach_mul_(updates, rates)
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            torch._foreach_sub_(weights, buffers)


class Lamb(AdamMoments):
    """Adam with decoupled weight decay whose update is scaled, per layer, to the norm of the layer's weights.

    You et al. 2019, "Large batch optimization for deep learning" (arXiv 1904.00962), algorithm 2 with bias correction, as in
    timm, which scales only what decays. Groups with ``adapt`` False (norm layers, biases) use Adam's update.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights, gradients in self.by_steps(group):
                updates = self.updates(weights, gradients, group)
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
                if group["adapt"]:
                    ratios = _ratio(_norms(weights), _norms(updates))
                    torch._foreach_mul_(updates, list(ratios.unbind()))
                torch._foreach_sub_(weights, torch._foreach_mul(updates, group["lr"]))


def _norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(torch._foreach_norm(tensors)))


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b, and 1 where either is zero."""
    return torch.where((a > 0) & (b > 0), a / b, torch.ones_like(a))
