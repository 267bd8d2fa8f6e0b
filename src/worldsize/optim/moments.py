"""What optimizers that keep moments of the gradient share."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class AdamMoments(torch.optim.Optimizer):
    """The moments of Kingma and Ba 2014, "Adam" (arXiv 1412.6980), algorithm 1, and the update that they give.

    A subclass applies `updates` to the weights.
    """

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapt": True})

    def by_steps(self, group: dict[str, Any]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """The group's parameters that have a gradient, and these gradients: those together that have done as many steps.

        All have, unless the run resumed with more parts to train.
        """
        found: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for weight, gradient in zip(*with_gradients(group), strict=True):
            weights, gradients = found.setdefault(float(self._moments(weight)["step"]), ([], []))
            weights.append(weight)
            gradients.append(gradient)
        return list(found.values())

    def updates(
        self, weights: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any], nesterov: bool = False
    ) -> list[torch.Tensor]:
        """Adam's updates without the learning rate, in new tensors.

        Args:
            nesterov: as if the first moment had decayed towards the gradient twice.
        """
        beta1, beta2 = group["betas"]
        states = [self._moments(p) for p in weights]
        steps = states[0]["step"]  # on the host; the same for all
        for state in states:
            state["step"] = steps + 1
        t = float(states[0]["step"])
        means, squares = ([state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        divisors = torch._foreach_sqrt(torch._foreach_div(squares, 1 - beta2**t))
        torch._foreach_add_(divisors, group["eps"])
        ahead = torch._foreach_lerp(means, gradients, 1 - beta1) if nesterov else means
        return list(torch._foreach_div(torch._foreach_div(ahead, 1 - beta1**t), divisors))

    def _moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


def kept(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor ``name`` that the optimizer keeps for the parameter, of its shape and dtype; zeros at first."""
    state = optimizer.state[parameter]
    if name not in state:
        state[name] = torch.zeros_like(parameter)
    tensor: torch.Tensor = state[name]
    return tensor


def with_gradients(group: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The group's parameters that have a gradient, and these gradients."""
    weights = [p for p in group["params"] if p.grad is not None]
    return weights, [p.grad for p in weights]
