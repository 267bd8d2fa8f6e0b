"""What an exported file computes."""

from __future__ import annotations

import torch
from torch import nn

LOGITS = "logits"  # name of the output of an ONNX file


class Served(nn.Module):
    """The network's logits, divided by ``temperature``; with ``mirror`` the mean of those of an image and its mirror image.

    Normalized float32 (n, 3, size, size) to float32 (n, classes).
    """

    def __init__(self, network: nn.Module, temperature: float = 1.0, mirror: bool = False) -> None:
        super().__init__()
        self.network = network
        self._temperature = temperature
        self._mirror = mirror

    def forward(self, normalized: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(normalized)
        if self._mirror:
            logits = (logits + self.network(normalized.flip(3))) / 2
        return logits if self._temperature == 1.0 else logits / self._temperature
