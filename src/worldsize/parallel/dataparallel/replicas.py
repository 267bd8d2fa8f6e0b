"""The module of `dataparallel`: nn.DataParallel that computes what as many processes would."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from worldsize.models.factory import norms


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
        """Give the model the mean of the replicas' running statistics.

        Call it after the backward pass: the model shares its buffers with the first replica, and that reads them.
        """
        if not self._replicas:  # a single device
            return
        with torch.no_grad():
            for own, *others in zip(norms(self.module), *map(norms, self._replicas), strict=True):
                for name, kept in own.named_buffers():
                    if kept.is_floating_point():  # all but the number of batches
                        kept.copy_(torch.stack([getattr(other, name).to(kept.device) for other in others]).mean(0))
        self._replicas = ()
