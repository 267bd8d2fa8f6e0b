"""How to fine-tune on a dataset: BiT-HyperRule, from the number and the size of its images.

Kolesnikov et al. 2020, "Big Transfer" (arXiv 1912.11370), section 3.3, and bit_hyperrule.py of its code: SGD with lr
0.003 for batches of 512, momentum 0.9 and no weight decay; 500, 10,000 or 20,000 steps for fewer than 20,000, fewer than
500,000 or more images; mixup 0.1 from 20,000 images on. The paper divides the learning rate by 10 after 30, 60 and 90 %
of the steps; the code does so from 20,000 images on, below after 40, 60 and 80 %. Here it is as in the code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LR, REFERENCE_BATCH = 0.003, 512
_SMALL, _MEDIUM = 20_000, 500_000
# get_schedule of bit_hyperrule.py: the end of the warmup, three drops of the learning rate, and the end, in steps.
_SMALL_STEPS = (100, 200, 300, 400, 500)
_MEDIUM_STEPS = (500, 3_000, 6_000, 9_000, 10_000)
_LARGE_STEPS = (500, 6_000, 12_000, 18_000, 20_000)


@dataclass(frozen=True)
class Plan:
    """What the rule says. ``warmup_epochs`` and the ``milestones`` of the learning rate are in epochs."""

    epochs: int
    global_batch: int
    warmup_epochs: float
    milestones: tuple[float, ...]
    mixup: float


def plan(images: int, largest_batch: int = REFERENCE_BATCH) -> Plan:
    """The plan for a number of training images, at least 1.

    The batch is 512, or less if the machine (``largest_batch``, a power of two) or the dataset is small: a power of two, so
    that an epoch has ten steps, but large enough for several processes where the images suffice for it.
    """
    least = 32 if images >= 4 * 32 else 16 if images >= 16 else min(8, 1 << images.bit_length() - 1)
    batch = max(least, min(largest_batch, 1 << (max(1, images // 10)).bit_length() - 1))
    warmup, *drops, steps = _schedule(images)
    per_epoch = max(1, images // batch)
    epochs = math.ceil(steps / per_epoch)
    return Plan(
        epochs=epochs,
        global_batch=batch,
        warmup_epochs=round(epochs * warmup / steps, 2),
        milestones=tuple(round(epochs * drop / steps, 2) for drop in drops),
        mixup=0.1 if images >= _SMALL else 0.0,
    )


def micro_batch(global_batch: int) -> int:
    """A quarter of the batch, so that 1, 2 and 4 processes can share it; 4 to 32, because BatchNorm needs several images.

    A smaller batch is not divided.
    """
    return min(global_batch, max(4, min(32, global_batch // 4)))


def drops(images: int) -> str:
    """After which percentages of the steps the learning rate drops, in words."""
    _, *after, steps = _schedule(images)
    first, second, third = (100 * drop // steps for drop in after)
    return f"{first}, {second} and {third}"


def _schedule(images: int) -> tuple[int, ...]:
    return _SMALL_STEPS if images < _SMALL else _MEDIUM_STEPS if images < _MEDIUM else _LARGE_STEPS
