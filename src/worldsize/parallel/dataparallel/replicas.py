"""The module of `dataparallel`: nn.DataParallel that computes what as many processes would."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from worldsize.models.factory import norms, ran, written


class Replicas(nn.DataParallel[nn.Module]):
    """nn.DataParallel keeps the running statistics of the first replica only; here `average_statistics` averages them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._replicas: Sequence[nn.Module] = ()

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        self._replicas = replicas
        grad = torch.is_grad_enabled()

        def forward(replica: nn.Module, own_inputs: Any, own_kwargs: Any) -> Any:
            place = own_inputs[0].device
            with (
                torch.cuda.device(place) if place.type == "cuda" else nullcontext(),
                torch.set_grad_enabled(grad),
            ):
                return replica(*own_inputs, **own_kwargs)

        with ThreadPoolExecutor(len(replicas)) as pool:
            return list(pool.map(forward, replicas, inputs, kwargs))

    def average_statistics(self) -> None:
        """Give the model the mean of the running statistics of the replicas that used a layer.

        Call it after the backward pass: the model shares its buffers with the first replica, and that reads them.
        """
        if not self._replicas:  # a single device
            return
        with torch.no_grad():
            for own, *others in zip(norms(self.module), *map(norms, self._replicas), strict=True):
                kept = written(own)
                theirs = [[values.to(kept[0].device) for values in written(other)] for other in others]
                used = torch.stack([ran(variances) for _, variances in theirs])
                share = used.to(kept[0].dtype).mean(0)
                for values, parts in zip(kept, zip(*theirs, strict=True), strict=True):
                    mean = torch.where(used, torch.stack(parts), 0).mean(0) / share
                    values.copy_(torch.where(share > 0, mean, parts[0]))
        self._replicas = ()
