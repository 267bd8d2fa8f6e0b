"""Timing on the device: the host's clock on CPUs, events in the stream on GPUs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Stamp = float | torch.cuda.Event


def stamp(device: torch.device) -> Stamp:
    """A timestamp, taken without waiting for the device: seconds on the host's clock, or an event queued on the GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(begin: Stamp, end: Stamp) -> float:
    """Milliseconds between two stamps of one device; waits until the device has reached the second."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return (end - begin) * 1000
    assert not isinstance(end, float)
    end.synchronize()
    return begin.elapsed_time(end)
