"""Copies of tensors on the CPU, made while training continues."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from worldsize.checkpoint.format import Tensors
from worldsize.distributed.copy_stream import copy_stream


class Copying:
    """Copies tensors to the host: training may change them as soon as `copy` returns, or, if asked to, `settle`.

    Copies from a GPU are made while it computes on; those of tensors on the CPU by any thread that calls `wait`.

    All tensors of a device and type become one copy, because a network has hundreds of them, most of them small.

    Args:
        memory: of earlier copies that nobody reads any more, by name; filled again, and extended by what it lacks. New
            memory costs more than the copy itself, because the kernel clears its pages or pins them.
    """

    def __init__(self, memory: Tensors | None = None) -> None:
        self._memory: Tensors = {} if memory is None else memory
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._later: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def copy(
        self, tensors: Mapping[str, torch.Tensor], part: str = "", later: bool = False, into: Tensors | None = None
    ) -> Tensors:
        """Copies on the CPU, in the tensors' own memory layout; complete after `wait`.

        Args:
            part: distinguishes these tensors from others.
            later: the tensors do not change before `settle`. If they are on the CPU, it copies them; the result is empty
                until then.
            into: the result, if others are in it.
        """
        copies: Tensors = {} if into is None else into

        def make() -> None:
            alike: defaultdict[tuple[torch.device, torch.dtype], Tensors] = defaultdict(dict)
            for name, tensor in tensors.items():
                alike[tensor.device, tensor.dtype][name] = tensor.detach()
            for (device, dtype), several in alike.items():
                copies.update(self._copy_alike(several, f"{part}/{device}/{dtype}"))

        if later and not any(tensor.is_cuda for tensor in tensors.values()):
            self._later.append(make)
        else:
            make()
        return copies

    def settle(self) -> None:
        """Make the copies that are still to be made, or wait while another thread does: the tensors may change then."""
        with self._lock:
            while self._later:
                self._later[0]()
                del self._later[0]

    def _copy_alike(self, tensors: Tensors, name: str) -> Tensors:
        """Copies of tensors on one device and of one type, as parts of one tensor."""
        rows: list[torch.Tensor] = []
        strides: list[tuple[int, ...]] = []
        for tensor in tensors.values():
            row = in_memory_order(tensor)
            if row is None:
                tensor = tensor.contiguous()
                row = tensor.view(-1)
            rows.append(row)
            strides.append(tensor.stride())
        host = self._room(name, sum(map(len, rows)), rows[0])
        parts = host.split([len(row) for row in rows])
        if host.device != rows[0].device:
            self._to_host(host, torch.cat(rows))
        else:
            for part, row in zip(parts, rows, strict=True):
                part.copy_(row)  # torch.cat takes longer
        found = zip(tensors.items(), parts, strides, strict=True)
        return {key: part.as_strided(tensor.shape, stride) for (key, tensor), part, stride in found}

    def _room(self, name: str, n: int, like: torch.Tensor) -> torch.Tensor:
        room = self._memory.get(name)
        if room is None or len(room) != n:
            # Only copies to pinned memory return before they are done.
            room = torch.empty(n, dtype=like.dtype, pin_memory=like.is_cuda)
            self._memory[name] = room
        return room

    def _to_host(self, host: torch.Tensor, values: torch.Tensor) -> None:
        device, stream = values.device, copy_stream(values.device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._events.append((device, event))
        values.record_stream(stream)  # its memory is reused only after the copy

    def wait(self) -> None:
        """Complete all copies."""
        self.settle()
        for device, event in self._events:
            torch.cuda.set_device(device)  # a new thread has GPU 0, and would create a context there
            event.synchronize()


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view (n,) of the tensor's elements as they lie in memory; None if there are gaps between them, or overlaps."""
    if not tensor.is_contiguous():  # which most are; sorting takes longer
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return tensor.view(-1) if tensor.is_contiguous() else None


def copy(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Contiguous copies on the CPU, independent of further training, after waiting for them."""
    copying = Copying()
    copies = copying.copy(tensors)
    copying.wait()
    return {name: tensor.contiguous() for name, tensor in copies.items()}
