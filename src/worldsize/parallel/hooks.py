"""How one of DDP's gradient buckets is averaged: whole, as 16-bit numbers, or as a low-rank approximation."""

# No `from __future__ import annotations` here: DDP checks the hooks' annotations, and they must not be strings.

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from worldsize.parallel.base import Exchange
from worldsize.recipe import Parallel

Reduced = torch.futures.Future[torch.Tensor]

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Average:
    """The mean of a bucket, sent in its own type or as fp16 or bf16.

    It is divided by ``predivide`` before the sum and by the rest of the world size after it: all before (None) keeps the
    sum of many ranks within fp16's range, less before keeps small gradients from falling under it.
    """

    def __init__(self, settings: Parallel, world_size: int, exchange: Exchange) -> None:
        self._type = _TYPES.get(settings.compression)
        self._before = settings.predivide or world_size
        self._after = world_size / self._before
        self._exchange = exchange

    def reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if bucket.is_last():
            self._exchange.begin()
        whole = bucket.buffer()
        sent = whole.div_(self._before).to(self._type or whole.dtype)
        self._exchange.sends(sent)
        work = dist.all_reduce(sent, async_op=True).get_future()

        def received(done: Reduced) -> torch.Tensor:
            total = done.value()[0]
            if total is not whole:
                whole.copy_(total)
            return whole if self._after == 1 else whole.div_(self._after)

        return work.then(received)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Around a pass whose gradients are thrown away."""
        yield

    def state(self) -> dict[str, torch.Tensor]:
        """What the next step depends on."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`."""


class PowerSGD(Average):
    """PowerSGD: each weight gradient M (n x m) travels as P (n x r) and Q (m x r) with P Q^T near M.

    What the approximation loses is added to the next step's gradient, and Q begins where it ended (Vogels et al. 2019,
    arXiv 1905.13727, algorithms 1 and 2; the steps are torch's). Both, and the number of steps, are this rank's state.
    Vectors, and matrices that would not shrink by half, travel whole.
    """

    min_compression_rate = 2.0

    def __init__(self, settings: Parallel, world_size: int, exchange: Exchange) -> None:
        super().__init__(settings, world_size, exchange)
        self._rehearsing = False
        self._powersgd = torch_powersgd.PowerSGDState(
            None,
            matrix_approximation_rank=settings.powersgd_rank,
            start_powerSGD_iter=settings.powersgd_start,
            min_compression_rate=self.min_compression_rate,
        )

    def reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        powersgd = self._powersgd
        if self._rehearsing or powersgd.iter < powersgd.start_powerSGD_iter:
            if not self._rehearsing:
                powersgd.maybe_increase_iter(bucket)
            return super().reduce(None, bucket)
        if bucket.is_last():
            self._exchange.begin()
        before = powersgd.total_numel_after_compression
        reduced = torch_powersgd.powerSGD_hook(powersgd, bucket)
        sent = powersgd.total_numel_after_compression - before
        self._exchange.sent_bytes += sent * bucket.buffer().element_size()
        return reduced

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        self._rehearsing = True
        yield
        self._rehearsing = False

    def state(self) -> dict[str, torch.Tensor]:
        powersgd = self._powersgd
        _, keys, position, *_ = powersgd.rng.get_state()
        kept = {"powersgd.iter": torch.tensor(powersgd.iter), "powersgd.position": torch.tensor(position)}
        kept["powersgd.rng"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
        for kind, tensors in self._memories().items():
            kept |= {f"powersgd.{kind}.{bucket}": tensor for bucket, tensor in tensors.items()}
        return kept

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if "powersgd.iter" not in state:
            return
        powersgd = self._powersgd
        powersgd.iter = int(state["powersgd.iter"])
        keys = state["powersgd.rng"].numpy().astype(np.uint32)
        powersgd.rng.set_state(("MT19937", keys, int(state["powersgd.position"]), 0, 0.0))
        for kind, tensors in self._memories().items():
            prefix = f"powersgd.{kind}."
            tensors.update({int(k.removeprefix(prefix)): v for k, v in state.items() if k.startswith(prefix)})

    def _memories(self) -> dict[str, dict[int, torch.Tensor]]:
        powersgd = self._powersgd
        return {"error": powersgd.error_dict, "p": powersgd.p_memory_dict, "q": powersgd.q_memory_dict}
