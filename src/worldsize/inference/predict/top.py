"""From logits to rows: the best classes of each image."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """An image and its best classes with their probabilities or logits, the best first; or why it is ``broken``."""

    name: str
    indices: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    broken: str | None = None


def probabilities(logits: torch.Tensor, multilabel: bool) -> torch.Tensor:
    """Softmax over the classes, or, if images have several labels, each class's own probability. (n, classes), float32."""
    logits = logits.float()
    return logits.sigmoid() if multilabel else logits.softmax(1)
