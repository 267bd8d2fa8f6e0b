"""How DDP averages a gradient bucket: uncompressed, as 16-bit numbers, or as a low-rank approximation."""

# No `from __future__ import annotations`: DDP checks the annotations of hooks, which must not be strings.

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.config.recipe import Parallel
from worldsize.parallel.base import Exchange

Reduced = torch.futures.Future[torch.Tensor]

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Hook:
    """Averages the buckets of each backward pass. This one keeps nothing from one step to the next."""

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Around a pass whose gradients are discarded."""
        yield

    def state(self) -> dict[str, torch.Tensor]:
        """What the next step depends on."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`."""


class Average(Hook):
    """The mean of a bucket, sent in its own type or as fp16 or bf16.

    It is divided by ``predivide`` before the sum and by world_size / predivide after it. Dividing completely before the
    sum (None) keeps the sum of many ranks within the range of fp16; dividing less before it avoids underflow.
    """

    def __init__(self, model: nn.Module, settings: Parallel, world_size: int, exchange: Exchange) -> None:
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


class Builtin(Hook):
    """The mean of a bucket by torch's own hook: the same bits as `Average`, in C++.

    A hook in Python needs the interpreter for each bucket in the middle of the backward pass, while other threads use it.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: list[nn.Parameter], exchange: Exchange) -> None:
        self._exchange = exchange
        self._bytes = sum(p.numel() * p.element_size() for p in parameters)
        # Not DDP's default, which multiplies by the inverse of the world size: that rounds, unless it is a power of two.
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)  # type: ignore[attr-defined]
        ddp.register_forward_hook(self._computed)

    def _computed(self, ddp: nn.Module, _: object, output: tuple[torch.Tensor, ...]) -> None:
        losses = output[0]
        if ddp.require_backward_grad_sync and losses.requires_grad:
            losses.register_hook(self._backward_begins)

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._exchange.sent_bytes += self._bytes
        # Called after the last gradient is computed, and before DDP's own callback, which is queued later and waits for the
        # buckets.
        torch.autograd.Variable._execution_engine.queue_callback(self._exchange.begin)


class PowerSGD(Average):
    """PowerSGD: each weight gradient M (n x m) is sent as P (n x r) and Q (m x r) with P Q^T close to M.

    P is M Q with the previous step's Q, averaged and orthonormalized; Q is then M^T P, averaged. The approximation error
    is added to the next step's gradient (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2). Vectors, and
    matrices that would not shrink by half, are sent uncompressed with the Ps.

    All buckets wait for the last one and are then sent in two messages. torch's own PowerSGD hook starts with each bucket;
    on gloo its nested waits deadlock with two or more buckets (seen with torch 2.12), and it cannot view channels_last
    gradients as matrices.
    """

    min_compression = 2.0

    def __init__(self, model: nn.Module, settings: Parallel, world_size: int, exchange: Exchange) -> None:
        super().__init__(model, settings, world_size, exchange)
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._device = next(model.parameters()).device
        self._world_size = world_size
        self._rank = settings.powersgd_rank
        self._start = settings.powersgd_start
        self._step = 0
        self._rehearsing = False
        self._held: list[tuple[dist.GradBucket, Reduced]] = []  # type: ignore[name-defined]
        self._memory: dict[str, torch.Tensor] = {}

    def reduce(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if self._rehearsing or self._step < self._start:
            self._step += bucket.is_last() and not self._rehearsing
            return super().reduce(None, bucket)
        device = bucket.buffer().device
        held: Reduced = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        self._held.append((bucket, held))
        if bucket.is_last():
            self._exchange.begin()
            pairs = (zip(b.parameters(), b.gradients(), strict=True) for b, _ in self._held)
            self._approximate({self._names[p]: _in_its_layout(g, p) for pair in pairs for p, g in pair})
            for waiting, done in self._held:
                done.set_result(waiting.buffer())
            self._held.clear()
            self._step += 1
        return held

    def _approximate(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace the gradients, by parameter name, by the approximation of their mean."""
        matrices = {name: g for name, g in gradients.items() if self._shrinks(g)}
        whole = [g for name, g in gradients.items() if name not in matrices]
        ms = {name: g.reshape(g.shape[0], -1) + self._memory.get(f"error.{name}", 0) for name, g in matrices.items()}
        qs = [self._previous_q(name, m) for name, m in ms.items()]
        # An orthonormal Q also covers directions that the last gradient lacked: at full rank nothing is lost.
        ps = [m @ torch.linalg.qr(q).Q for m, q in zip(ms.values(), qs, strict=True)]
        self._average(ps + whole)
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = [m.T @ p for m, p in zip(ms.values(), ps, strict=True)]
        self._average(qs)
        for (name, m), p, q in zip(ms.items(), ps, qs, strict=True):
            near = p @ q.T
            self._memory[f"error.{name}"], self._memory[f"q.{name}"] = m - near, q
            matrices[name].copy_(near.reshape(matrices[name].shape))

    def _shrinks(self, gradient: torch.Tensor) -> bool:
        if gradient.ndim < 2:
            return False
        n, m = gradient.shape[0], gradient[0].numel()
        return (n + m) * min(self._rank, n, m) * self.min_compression < n * m

    def _previous_q(self, name: str, m: torch.Tensor) -> torch.Tensor:
        """(m, r); without one, or with another r (powersgd_rank has changed): a draw, the same on all ranks."""
        shape = (m.shape[1], min(self._rank, *m.shape))
        stored = self._memory.get(f"q.{name}")
        if stored is not None and stored.shape == shape:
            return stored
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(m)

    def _average(self, tensors: list[torch.Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        self._exchange.sends(flat)
        dist.all_reduce(flat)
        flat /= self._world_size
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    def state(self) -> dict[str, torch.Tensor]:
        return {f"powersgd.{name}": tensor for name, tensor in self._memory.items()} | {
            "powersgd.step": torch.tensor(self._step)
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        own = {k.removeprefix("powersgd."): v for k, v in state.items() if k.startswith("powersgd.")}
        if own:
            self._step = int(own.pop("step"))
            self._memory = {name: tensor.to(self._device) for name, tensor in own.items()}


def _in_its_layout(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A bucket returns gradients as if contiguous; in memory they have the layout of their parameters (channels_last)."""
    return gradient.as_strided(parameter.size(), parameter.stride(), gradient.storage_offset())
