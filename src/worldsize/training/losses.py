"""The loss of each sample: cross-entropy or binary cross-entropy."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from worldsize.config.recipe import Recipe


class Criterion(nn.Module):
    """The recipe's loss.

    Its ``forward`` maps logits (n, classes) to losses (n,). The target is the label, int64 (n,), or a mixture: ``weights``
    (n, 1) of the label and the rest of ``others`` (n,). With the loss bce, it can be several labels:
    uint8 (n, classes), 1 for each.

    Args:
        class_weights: (classes,), factors of the classes' parts of the loss; None: 1. The mean of the losses is over the
            number of samples, not over their weights: so it does not depend on which samples share a batch.
    """

    def __init__(self, recipe: Recipe, class_weights: torch.Tensor | None = None) -> None:
        super().__init__()
        self._class_weights = class_weights
        self._loss = recipe.loss
        self._smoothing = recipe.label_smoothing

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        others: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._loss.name == "bce":
            return self._binary(logits, _targets(logits, labels, others, weights))
        target = labels if others is None else _targets(logits, labels, others, weights)
        factors = self._factors(logits)
        return functional.cross_entropy(logits, target, factors, reduction="none", label_smoothing=self._smoothing)

    def _factors(self, logits: torch.Tensor) -> torch.Tensor | None:
        if self._class_weights is None:
            return None
        return self._class_weights.to(logits.device, torch.promote_types(logits.dtype, torch.float32))

    def _binary(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._loss.bce_threshold is not None:
            targets = (targets > self._loss.bce_threshold).to(targets.dtype)
        # After the threshold, which would otherwise make every smoothed target 1.
        targets = targets * (1 - self._smoothing) + self._smoothing / targets.shape[1]
        losses = functional.binary_cross_entropy_with_logits(logits, targets, self._factors(logits), reduction="none")
        return losses.sum(1) if self._loss.bce_reduction == "sum" else losses.mean(1)


def _targets(
    logits: torch.Tensor, labels: torch.Tensor, others: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Probabilities of the classes, (n, classes), at least float32."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    own = _hot(labels, logits).to(dtype)
    if others is None or weights is None:
        return own
    share = weights.to(dtype)
    return own * share + _hot(others, logits).to(dtype) * (1 - share)


def _hot(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return labels if labels.ndim == 2 else functional.one_hot(labels, logits.shape[1])
