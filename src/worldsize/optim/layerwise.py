"""Optimizers that scale the learning rate of each layer, for large batches: LARS and LAMB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


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
            weights, gradients = _with_gradients(group)
            if not weights:
                continue
            decay = group["weight_decay"]
            rates: list[Any] = [group["lr"]] * len(weights)
            if group["adapt"]:
                sizes, slopes = _norms(weights), _norms(gradients)
                rates = list((group["lr"] * _ratio(group["trust"] * sizes, slopes + decay * sizes)).unbind())
            buffers = [self._momentum(p) for p in weights]
            updates = torch._foreach_add(gradients, weights, alpha=decay)
            torch._foreach_mul_(updates, rates)
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            torch._foreach_sub_(weights, buffers)

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer


class Lamb(torch.optim.Optimizer):
    """Adam with decoupled weight decay whose update is scaled, per layer, to the norm of the layer's weights.

    You et al. 2019, "Large batch optimization for deep learning" (arXiv 1904.00962), algorithm 2 with bias correction, as in
    timm. Groups with ``adapt`` False (norm layers, biases) use Adam's update.
    """

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapt": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights, gradients in self._by_steps(group):
                updates = self._updates(weights, gradients, group["betas"], group["eps"])
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
                if group["adapt"]:
                    ratios = _ratio(_norms(weights), _norms(updates))
                    torch._foreach_mul_(updates, list(ratios.unbind()))
                torch._foreach_sub_(weights, torch._foreach_mul(updates, group["lr"]))

    def _by_steps(self, group: dict[str, Any]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """The group's parameters that have a gradient, and these gradients: those together that have done as many steps.

        All have, unless the run resumed with more parts to train.
        """
        found: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for weight, gradient in zip(*_with_gradients(group), strict=True):
            weights, gradients = found.setdefault(float(self._moments(weight)["step"]), ([], []))
            weights.append(weight)
            gradients.append(gradient)
        return list(found.values())

    def _updates(
        self, weights: list[torch.Tensor], gradients: list[torch.Tensor], betas: tuple[float, float], eps: float
    ) -> list[torch.Tensor]:
        """Adam's updates without the learning rate."""
        beta1, beta2 = betas
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
        torch._foreach_add_(divisors, eps)
        return list(torch._foreach_div(torch._foreach_div(means, 1 - beta1**t), divisors))

    def _moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


def _with_gradients(group: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The group's parameters that have a gradient, and these gradients."""
    weights = [p for p in group["params"] if p.grad is not None]
    return weights, [p.grad for p in weights]


def _norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(torch._foreach_norm(tensors)))


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b, and 1 where either is zero."""
    return torch.where((a > 0) & (b > 0), a / b, torch.ones_like(a))
