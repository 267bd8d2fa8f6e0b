"""Muon for networks with convolutions, computed by torch's own implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from worldsize.errors import UserError


class Muon(torch.optim.Optimizer):
    """Muon for weight matrices and convolution filters, AdamW for everything else.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) makes the update of a matrix orthogonal. Filters
    (out, in, h, w) are matrices (out, in * h * w), as in airbench94_muon. Groups with ``adapt`` False use AdamW: norm
    layers, biases, tokens and, as Muon's authors advise, the classifier. The update is scaled to the size of AdamW's (Liu et
    al. 2025, arXiv 2502.16982, "match_rms_adamw"), so that both share learning rate and weight decay.

    torch computes the orthogonal matrix in bfloat16, which most CPUs do slowly. With strategies other than bitwise, the
    numbers of two world sizes therefore agree only to that precision.

    Raises:
        UserError: this torch has no Muon (before 2.9).
    """

    def __init__(
        self, params: ParamsT, lr: float, momentum: float, nesterov: bool, betas: tuple[float, float], eps: float
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"--optimizer.name muon requires torch 2.9 or later; this is {torch.__version__}")
        self._matrices: dict[torch.Tensor, torch.Tensor] = {}
        # torch's two optimizers, by the ``adapt`` of their groups; each exists once it has a group.
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        muon: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
        adamw: dict[str, Any] = {"betas": betas, "eps": eps, "foreach": True}
        self._makers: dict[bool, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
            True: lambda groups: torch.optim.Muon(groups, lr=lr, **muon),
            False: lambda groups: torch.optim.AdamW(groups, lr=lr, **adamw),
        }
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "adapt": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        adapt = group["adapt"]
        chosen = [self._matrix(p) for p in group["params"]] if adapt else group["params"]
        own = {"params": chosen, "weight_decay": group["weight_decay"], "of": group}
        if adapt in self._parts:
            self._parts[adapt].add_param_group(own)
        else:
            self._parts[adapt] = self._makers[adapt]([own])

    def _matrix(self, parameter: torch.Tensor) -> torch.Tensor:
        self._matrices[parameter] = _like(parameter, parameter.detach())
        return self._matrices[parameter]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self._parts.values():
            for group in part.param_groups:
                group["lr"] = group["of"]["lr"]
                # Horovod's Adasum steps one parameter after the other: each is alone in its group for that time.
                group["params"] = [self._shared(part, parameter) for parameter in group["of"]["params"]]
            part.step()

    def _shared(self, part: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter for torch's optimizer, which works on this optimizer's state and the parameter's current memory."""
        state = self.state[parameter]
        if parameter not in self._matrices:
            part.state[parameter] = state
            return parameter
        matrix = self._matrices[parameter]
        matrix.data = _like(parameter, parameter.detach())
        matrix.grad = None if parameter.grad is None else _like(parameter, parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        part.state[matrix]["momentum_buffer"] = _like(parameter, state["momentum_buffer"])
        return matrix


def _like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as (out, rest), a view if its memory is in the parameter's order.

    The columns are in that order too, which changes an orthogonal update only by rounding.
    """
    if parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.flatten(1)
