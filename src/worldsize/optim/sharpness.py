"""Sharpness-aware minimization: the gradient not at the weights but at the worst point near them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from worldsize.config.recipe import Optimizer


def due(settings: Optimizer, step: int) -> bool:
    """Whether step ``step`` (0-based) of a run uses it."""
    return settings.sam_rho > 0 and step % settings.sam_every == 0


@contextmanager
def ascended(model: nn.Module, rho: float) -> Iterator[None]:
    """Within this context, the weights are moved by ``rho`` along their gradient; afterwards they have their old bits.

    Foret et al. 2021, "Sharpness-aware minimization for efficiently improving generalization" (arXiv 2010.01412), equation
    2 with p = 2: w + rho * g / |g|, over all weights together. A factor of the gradient, such as a loss scale, does not
    matter. The gradient itself stays as it is.
    """
    trained: list[Any] = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad for p in trained]
    weights = [p.detach().clone() for p in trained]
    with torch.no_grad():
        scale = rho / (get_total_norm(gradients) + 1e-12)
        torch._foreach_add_(trained, torch._foreach_mul(gradients, scale))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(trained, weights)
