"""SGD whose weight decay is decoupled from the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Sgdw(torch.optim.SGD):
    """SGD with momentum; each step first multiplies the weights by 1 - weight_decay * lr / (peak * lr_scale).

    Loshchilov and Hutter 2017, "Decoupled weight decay regularization" (arXiv 1711.05101), algorithm 1: the decay follows
    the schedule of the learning rate, not its size. MosaicML Composer's ``DecoupledSGDW`` does the same.

    Args:
        peak: the run's peak learning rate, whose decay is ``weight_decay`` itself.
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float, nesterov: bool, peak: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum, nesterov=nesterov, foreach=True)
        self._peak = peak

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["decoupled_decay"], group["weight_decay"] = group["weight_decay"], 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights: list[Any] = [p for p in group["params"] if p.grad is not None]
            if weights and group["decoupled_decay"]:
                share = group["lr"] / (self._peak * group.get("lr_scale", 1.0))
                torch._foreach_mul_(weights, 1 - group["decoupled_decay"] * share)
        super().step(closure)
