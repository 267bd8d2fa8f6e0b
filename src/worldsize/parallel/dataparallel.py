"""One process drives several GPUs: torch's nn.DataParallel.

The slow way: each forward pass copies the model to every GPU, gathers on the first one, and one interpreter feeds them all.
It is here to be compared with; `ddp` does the same with a process per GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from worldsize.model import norms
from worldsize.parallel import base


class Strategy(base.Strategy):
    name = "dataparallel"

    def __init__(self, parts: base.Parts) -> None:
        super().__init__(parts)
        self.module = _DataParallel(parts.module)

    def describe(self) -> str:
        return f"{self.name} on {torch.cuda.device_count()} GPUs"


class _DataParallel(nn.DataParallel[nn.Module]):
    """Keeps the running statistics of all replicas, where torch keeps the first one's."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        outputs = super().parallel_apply(replicas, inputs, kwargs)
        average_statistics(self.module, replicas)
        return outputs


def average_statistics(model: nn.Module, replicas: Sequence[nn.Module]) -> None:
    """Give ``model`` the mean of the replicas' running statistics: that of the moving averages of all their batches."""
    with torch.no_grad():
        for own, *theirs in zip(norms(model), *(norms(replica) for replica in replicas), strict=True):
            for name in ("running_mean", "running_var"):
                kept = getattr(own, name)
                kept.copy_(torch.stack([getattr(t, name).to(kept.device) for t in theirs]).mean(0))
