"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from worldsize.config.recipe import Optimizer, Schedule


def peak_lr(optimizer: Optimizer, global_batch: int) -> float:
    """The peak learning rate for this global batch.

    ``linear`` multiplies by ``global_batch / lr_reference_batch`` (Goyal et al. 2017, arXiv 1706.02677,
    section 2.1), ``sqrt`` by its square root (Krizhevsky 2014, arXiv 1404.5997, section 5).
    """
    ratio = global_batch / optimizer.lr_reference_batch
    return optimizer.lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[optimizer.lr_scaling]


def factor(schedule: Schedule, step: int, steps_per_epoch: int, epochs: int) -> float:
    """The fraction (0 to 1) of the peak rate for step ``step`` (0 is the first) of ``epochs * steps_per_epoch``.

    Warmup rises linearly from ``warmup_start`` and reaches 1 at the first step after warmup (Goyal et al. 2017,
    section 2.2). Without ``warmup_prefix``, what is "after warmup" here begins at step 0, and warmup hides its beginning.
    ``cosine`` and ``linear`` then fall to ``end``, which the step after the last one would use.
    ``step`` multiplies by ``gamma`` at each milestone, ``exponential`` by ``gamma`` per epoch after warmup, smoothly.
    ``onecycle`` has its own warmup: a cosine from 1/25 up to 1 over the warmup epochs, then a cosine down to ``end`` at
    the last step (Smith and Topin 2018, arXiv 1708.07120, in the cosine form of torch's OneCycleLR). ``polynomial``
    falls to ``end`` as (1 - progress) ** power. ``restarts`` repeats the cosine, each cycle ``cycle_growth`` times as long
    as the one before it (Loshchilov and Hutter 2017, arXiv 1608.03983). ``piecewise`` interpolates
    between ``values`` at the epochs ``milestones``, without warmup.
    """
    total = steps_per_epoch * epochs
    warmup = schedule.warmup_epochs * steps_per_epoch
    if schedule.name == "piecewise":
        return _interpolated(step / steps_per_epoch, schedule.milestones, schedule.values)
    if schedule.name == "onecycle":
        return _one_cycle(step, total, warmup, schedule.end)
    if step < warmup:
        return schedule.warmup_start + (1 - schedule.warmup_start) * step / warmup
    hidden = 0.0 if schedule.warmup_prefix else warmup
    after = step - warmup + hidden
    progress = after / (total - warmup + hidden)
    match schedule.name:
        case "cosine":
            return schedule.end + (1 - schedule.end) * (1 + math.cos(math.pi * progress)) / 2
        case "restarts":
            first = schedule.cycle_epochs * steps_per_epoch
            progress = _progress_of_cycle(after, first, schedule.cycle_growth)
            return schedule.end + (1 - schedule.end) * (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            return schedule.end + (1 - schedule.end) * (1 - progress)
        case "polynomial":
            return schedule.end + (1 - schedule.end) * (1 - progress) ** schedule.power
        case "exponential":
            return schedule.gamma ** (after / steps_per_epoch)
        case "step":
            # Not m * steps_per_epoch: of 1.1 epochs of 100 steps, that is more than 110.
            return schedule.gamma ** sum(step / steps_per_epoch >= m for m in schedule.milestones)
        case _:
            return 1.0


def _one_cycle(step: int, total: int, warmup: float, end: float) -> float:
    start = 1 / 25
    peak = max(warmup - 1, 0)
    if step <= peak and peak > 0:
        return 1 + (start - 1) * (1 + math.cos(math.pi * step / peak)) / 2
    progress = (step - peak) / max(total - 1 - peak, 1)
    return end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2


def _progress_of_cycle(step: float, first: float, growth: int) -> float:
    """How far (0 to 1) the step is in its cycle; the first one has ``first`` steps, each other one ``growth`` times more."""
    begin, length = 0.0, first
    # 1.1 epochs of 100 steps are 110.00000000000001: a cycle that ends at a step must not end after it.
    while step >= begin + length - 1e-6:
        begin, length = begin + length, length * growth
    return max(step - begin, 0.0) / length


def _interpolated(epoch: float, epochs: Sequence[float], values: Sequence[float]) -> float:
    """Linear between the points, constant outside of them."""
    if epoch <= epochs[0]:
        return values[0]
    for (left, low), (right, high) in pairwise(zip(epochs, values, strict=True)):
        if epoch < right:
            return low + (high - low) * (epoch - left) / (right - left)
    return values[-1]
