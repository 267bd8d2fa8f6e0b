"""Where the time of a window of steps went, on each rank (pure).

Communication is split at each step: the rank that waits least waits for nobody, so what it still waits for is the transfer;
what others wait longer, they wait for slower ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worldsize.track.base import Window

# Parts of a step, which add up to step_ms.
PARTS = (
    *("read_ms", "decode_ms", "copy_ms", "compute_ms", "transfer_ms", "waiting_ms"),
    *("checkpoint_ms", "metrics_ms", "loop_ms"),
)
NEWER = ("copy_ms",)  # parts that windows of older versions do not have
# What the operating system says of the same time, see `process_usage.Usage`, and how long the host waited for the
# device when the window was collected.
USAGE = ("cpu_ms", "cpu_wait_ms", "throttled_ms", "paused_ms", "faults", "thread_ms", "device_wait_ms")
# What a rank knows about a whole window, in this order.
TOTALS = ("reading_ms", "decoding_ms", "checkpoint_ms", "metrics_ms", *USAGE)

MOST_RANKS = 16  # that are listed one by one
SLOWEST = 4


@dataclass(frozen=True)
class Steps:
    """Milliseconds of n steps on W ranks, float64 (n, W): the step, and in it waiting for images, communication, the loop
    outside of the step's computation, and copying images to a GPU."""

    step: torch.Tensor
    data: torch.Tensor
    communication: torch.Tensor
    outside: torch.Tensor
    copying: torch.Tensor


def window(step: int, steps: Steps, totals: torch.Tensor, between_s: dict[str, float], every_rank: bool) -> Window:
    """The window that ends with ``step``.

    Args:
        totals: sums over the window for each rank, float64 (W, len(TOTALS)), in the order of `TOTALS`.
        between_s: see `track.base.Window`.
        every_rank: list each rank, however many there are.
    """
    count, size = steps.step.shape
    total = dict(zip(TOTALS, (totals / count).T, strict=True))
    mean = {"step_ms": steps.step.mean(0)} | _parts(steps, total) | {name: total[name] for name in USAGE}
    ranks = list(range(size))
    if size > MOST_RANKS and not every_rank:
        own = mean["step_ms"] - mean["transfer_ms"] - mean["waiting_ms"]
        ranks = sorted(own.topk(SLOWEST).indices.tolist())
    listed = {name: values[ranks].tolist() for name, values in mean.items()}
    return Window(step, count, between_s, ranks, listed, {name: float(values.mean()) for name, values in mean.items()})


def _parts(steps: Steps, total: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`PARTS` of each rank, (W,) each: they add up to the mean step."""
    transfer = steps.communication.min(1, keepdim=True).values.expand_as(steps.communication)
    transfer, waiting = transfer.mean(0), (steps.communication - transfer).mean(0)
    outside, data, copying = (values.mean(0) for values in (steps.outside, steps.data, steps.copying))
    checkpoint = torch.minimum(total["checkpoint_ms"], outside)
    metrics = torch.minimum(total["metrics_ms"], outside - checkpoint)
    work = total["reading_ms"] + total["decoding_ms"]
    read = torch.where(work > 0, data * total["reading_ms"] / work.clamp(min=1e-9), torch.zeros_like(data))
    compute = steps.step.mean(0) - data - copying - transfer - waiting - outside
    loop = outside - checkpoint - metrics
    parts = (read, data - read, copying, compute, transfer, waiting, checkpoint, metrics, loop)
    return dict(zip(PARTS, parts, strict=True))
