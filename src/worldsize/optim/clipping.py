"""Gradient clipping: by the global norm, by value, or relative to the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from worldsize.config.recipe import Optimizer
from worldsize.models import networks

_LEAST_NORM = 1e-3  # of a unit's weights: those that begin at 0 must be able to leave it


def clip(model: nn.Module, settings: Optimizer, norm: torch.Tensor) -> None:
    """Clip the gradients of a network in place, in the way that the settings ask for, if they do.

    Args:
        norm: the gradients' global L2 norm, a scalar on their device.
    """
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    if settings.clip_norm is not None:
        clip_grads_with_norm_(trained.values(), settings.clip_norm, norm)
    if settings.clip_value is not None:
        clip_grad_value_(trained.values(), settings.clip_value)
    if settings.clip_agc is not None:
        heads = networks.classifier_prefixes(model)
        clip_adaptively([p for name, p in trained.items() if not name.startswith(heads)], settings.clip_agc)


@torch.no_grad()
def clip_adaptively(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Clip the gradient of each unit, in place, to ``factor`` times the L2 norm of its weights, at least 0.001.

    A unit is a row of a matrix, a filter of a convolution, or a whole vector. Brock et al. 2021, "High-performance
    large-scale image recognition without normalization" (arXiv 2102.06171), section 4; they leave out the classifier.
    """
    if not parameters:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    # On a GPU the host launches each operation, so what is small is computed for all parameters at once.
    shares = [_unit_norms(p) for p in parameters]
    torch._foreach_clamp_min_(shares, _LEAST_NORM)
    torch._foreach_mul_(shares, factor)
    torch._foreach_div_(shares, [_unit_norms(gradient) for gradient in gradients])
    torch._foreach_clamp_max_(shares, 1.0)
    for gradient, share in zip(gradients, shares, strict=True):
        gradient.mul_(share)


def _unit_norms(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)) or None, keepdim=True)
