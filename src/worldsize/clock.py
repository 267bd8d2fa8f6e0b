"""Time as the device sees it: the host's clock for CPUs, events in the stream for GPUs."""

from __future__ import annotations

import time

import torch

Stamp = float | torch.cuda.Event


def stamp(device: torch.device) -> Stamp:
    """This moment, without waiting for the device: seconds, or an event among its work."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(begin: Stamp, end: Stamp) -> float:
    """Milliseconds between two stamps of one device; waits until the device has passed the second."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return begin.elapsed_time(end)
    assert isinstance(end, float)
    return (end - begin) * 1000
