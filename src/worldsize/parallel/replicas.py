"""The module of `dataparallel`: nn.DataParallel that keeps the running statistics of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from worldsize.model import norms


class Replicas(nn.DataParallel[nn.Module]):
    """Averages the running statistics of all replicas; nn.DataParallel keeps the first replica's."""

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        outputs = super().parallel_apply(replicas, inputs, kwargs)
        average_statistics(self.module, replicas)
        return outputs


def average_statistics(model: nn.Module, replicas: Sequence[nn.Module]) -> None:
    """Give ``model`` the mean of the replicas' running statistics: the moving average over all their batches."""
    with torch.no_grad():
        for own, *others in zip(norms(model), *(norms(replica) for replica in replicas), strict=True):
            for name in ("running_mean", "running_var"):
                kept = getattr(own, name)
                kept.copy_(torch.stack([getattr(other, name).to(kept.device) for other in others]).mean(0))
