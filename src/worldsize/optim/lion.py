"""Lion: an optimizer with one moment, of which it takes only the sign."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT

from worldsize.optim.moments import kept, with_gradients


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, "Symbolic discovery of optimization algorithms" (arXiv 2302.06675), algorithm 2.

    Each weight moves by the learning rate, whatever the size of its gradient, so good learning rates are 3 to 10 times
    smaller than AdamW's, and weight decays as many times larger.
    """

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights, gradients = with_gradients(group)
            if not weights:
                continue
            beta1, beta2 = group["betas"]
            means = [kept(self, p, "exp_avg") for p in weights]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            directions = torch._foreach_sign(torch._foreach_lerp(means, gradients, 1 - beta1))
            torch._foreach_sub_(weights, torch._foreach_mul(directions, group["lr"]))
            torch._foreach_lerp_(means, gradients, 1 - beta2)
