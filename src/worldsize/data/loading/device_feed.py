"""Copies the next images to the GPU while it computes on the current ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from worldsize.data.loading.loader import Batch
from worldsize.distributed.copy_stream import copy_stream
from worldsize.distributed.device_timer import stamp


class Feed(Iterator[Batch]):
    """The same batches, on the device.

    On a GPU, `prefetch` starts the copy of the next batch on `copy_stream`; call it once the current batch's
    computation is launched. On a CPU it does nothing.

    Args:
        ahead: if False, batches stay on the host, as on a CPU, and are copied when they are computed.
    """

    def __init__(self, batches: Iterator[Batch], device: torch.device, ahead: bool = True) -> None:
        self._batches = batches
        self._device = device
        self._stream = copy_stream(device) if device.type == "cuda" and ahead else None
        self._copied: Batch | None = None

    def __next__(self) -> Batch:
        if self._stream is None:
            return next(self._batches)
        batch = self._copied or self._copy(next(self._batches), self._stream)
        self._copied = None
        compute = torch.cuda.current_stream(self._device)
        begin = stamp(self._device)
        compute.wait_stream(self._stream)
        copied = (begin, stamp(self._device))
        for tensor in (batch.pixels, batch.labels, *([] if batch.mix is None else [batch.mix])):
            tensor.record_stream(compute)  # their memory is reused only after what is computed from them
        return replace(batch, copied=copied)

    def prefetch(self) -> None:
        if self._stream is not None and self._copied is None:
            host = next(self._batches, None)
            self._copied = None if host is None else self._copy(host, self._stream)

    def _copy(self, host: Batch, stream: torch.cuda.Stream) -> Batch:
        with torch.cuda.stream(stream):
            pixels, labels = (tensor.to(self._device, non_blocking=True) for tensor in (host.pixels, host.labels))
            mix = None if host.mix is None else host.mix.to(self._device, non_blocking=True)
        return Batch(pixels, labels, host.indices, mix)
