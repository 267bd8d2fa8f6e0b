"""Batch arithmetic: which rank computes which samples of a step. Pure functions of integers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError

# Samples per forward pass that keep a large GPU busy with ResNet-50 at 224 pixels.
GPU_BATCH = 256


@dataclass(frozen=True)
class BatchPlan:
    """How ``world_size`` processes share a global batch of ``global_batch`` samples.

    A step's samples are positions ``step*global_batch .. (step+1)*global_batch - 1`` of the epoch.
    They form ``global_batch / micro_batch`` micro-batches; each rank computes the same number of consecutive ones. A
    forward pass computes ``groups`` micro-batches on each of the process's ``devices``.
    """

    global_batch: int
    micro_batch: int
    world_size: int
    devices: int = 1
    groups: int = 1

    @property
    def accumulation(self) -> int:
        """Forward passes per process and step."""
        return self.global_batch // (self.forward_batch * self.world_size)

    @property
    def forward_batch(self) -> int:
        """Samples per process and forward pass."""
        return self.micro_batch * self.groups * self.devices

    @property
    def per_process(self) -> int:
        """Samples per process and step."""
        return self.global_batch // self.world_size

    def first(self, step: int, rank: int, micro: int) -> int:
        """Position in the epoch of the first sample of the rank's ``micro``-th forward pass in the epoch's step ``step``."""
        return step * self.global_batch + (rank * self.accumulation + micro) * self.forward_batch

    def steps_per_epoch(self, samples: int) -> int:
        """Complete global batches in ``samples``; each epoch omits a different remainder.

        Raises:
            UserError: fewer samples than one batch.
        """
        if samples < self.global_batch:
            raise UserError(
                f"the training set has {samples} images, fewer than one global batch of {self.global_batch}: "
                f"lower --global-batch to at most {samples}"
            )
        return samples // self.global_batch

    def total_steps(self, recipe: Recipe, samples: int) -> int:
        """Steps of the complete run."""
        steps = self.steps_per_epoch(samples) * recipe.epochs
        return steps if recipe.max_steps is None else min(steps, recipe.max_steps)


def plan(recipe: Recipe, world_size: int, devices: int = 1) -> BatchPlan:
    """The batch plan of ``recipe`` on ``world_size`` processes with ``devices`` each.

    Raises:
        UserError: the micro-batches of a step are not divisible by the number of devices; lists valid numbers, and the
            nearest batches for this number.
    """
    if recipe.per_process_batch is not None:
        batch, sharing, name = recipe.per_process_batch, devices, "per-process-batch"
        global_batch = recipe.per_process_batch * world_size
    else:
        batch, sharing, name = recipe.global_batch, world_size * devices, "global-batch"
        global_batch = recipe.global_batch
    micro_batches = batch // recipe.micro_batch
    if micro_batches % sharing:
        fitting = ", ".join(str(w) for w in world_sizes(batch, recipe.micro_batch))
        raise UserError(
            f"{sharing} {'processes' if devices == 1 else 'devices'} cannot share a {name.replace('-', ' ')} of {batch} in "
            f"micro-batches of {recipe.micro_batch}: "
            f"{micro_batches} micro-batches per step are not a multiple of {sharing}.\n"
            f"World sizes that fit: {fitting}. {_remedy(recipe, name, world_size, devices)}"
        )
    whole = BatchPlan(global_batch, recipe.micro_batch, world_size, devices)
    return whole if recipe.forward_batch is None else with_forward_batch(whole, recipe.forward_batch)


def _remedy(recipe: Recipe, name: str, world_size: int, devices: int) -> str:
    """The nearest values of the batch ``name`` and of the micro-batch that this number of devices can share."""
    field = name.replace("-", "_")
    batch, sharing = getattr(recipe, field), devices if recipe.per_process_batch is not None else world_size * devices
    unit = recipe.micro_batch * sharing
    batches = [size for size in (batch // unit * unit, (batch // unit + 1) * unit) if size]
    # BatchNorm has no statistics of one sample.
    micro = [] if batch % sharing else [n for n in divisors(batch // sharing) if n > 1]
    micro.sort(key=lambda n: abs(math.log(n / recipe.micro_batch)))
    offers = [f"--{name} {size}" for size in batches if works(recipe, {field: size}, world_size, devices)]
    nearest = next((n for n in micro if works(recipe, {"micro_batch": n}, world_size, devices)), None)
    offers += [f"--micro-batch {nearest}"] if nearest is not None else []
    return f"Or use {' or '.join(offers)}." if offers else f"Or change --{name} or --micro-batch."


def works(recipe: Recipe, change: dict[str, int], world_size: int, devices: int = 1) -> bool:
    """Whether this number of processes can train the recipe with the changed fields."""
    with suppress(UserError):
        plan(recipe_files.validate(recipe.model_dump() | change, ""), world_size, devices)
        return True
    return False


def divisors(number: int) -> Iterable[int]:
    """All of them, ascending."""
    return (n for n in range(1, number + 1) if number % n == 0)


def with_forward_batch(plan: BatchPlan, samples: int) -> BatchPlan:
    """The plan with forward passes of ``samples`` per device.

    Raises:
        UserError: they do not divide the samples of a device into whole micro-batches; lists those that do.
    """
    fitting = forward_batches(plan)
    if samples not in fitting:
        raise UserError(
            f"--forward-batch {samples} does not fit: each device computes {fitting[-1]} samples per step, in micro-batches "
            f"of {plan.micro_batch}. Values that fit: {', '.join(map(str, fitting))}"
        )
    return replace(plan, groups=samples // plan.micro_batch)


def with_largest_forward_batch(plan: BatchPlan, limit: int) -> BatchPlan:
    """The plan with forward passes of at most ``limit`` samples per device, or one micro-batch if that is more."""
    return with_forward_batch(plan, max([plan.micro_batch, *(n for n in forward_batches(plan) if n <= limit)]))


def forward_batches(plan: BatchPlan) -> list[int]:
    """The possible numbers of samples per device and forward pass, ascending."""
    micro_batches = plan.per_process // plan.devices // plan.micro_batch
    return [n * plan.micro_batch for n in range(1, micro_batches + 1) if micro_batches % n == 0]


def world_sizes(global_batch: int, micro_batch: int) -> list[int]:
    """All world sizes that divide ``global_batch`` evenly into micro-batches of ``micro_batch``, in ascending order."""
    micro_batches = global_batch // micro_batch
    return [w for w in range(1, micro_batches + 1) if micro_batches % w == 0]


def shard(samples: int, rank: int, world_size: int) -> range:
    """The part of 0..samples-1 that belongs to ``rank``.

    Shards are consecutive and disjoint, cover all samples, and differ in size by at most one.
    """
    return range(samples * rank // world_size, samples * (rank + 1) // world_size)


def evaluation_batch(recipe: Recipe, device: str) -> int:
    """Samples per forward pass of an evaluation on a device of this type; does not depend on the world size.

    On a GPU as many whole micro-batches as `GPU_BATCH` contains, but no more than the recipe's ``forward_batch``: what does
    not fit into its memory in training must not be tried in an evaluation.
    """
    if device == "cpu":
        return recipe.micro_batch
    limit = min(GPU_BATCH, recipe.forward_batch or GPU_BATCH)
    return max(recipe.micro_batch, limit // recipe.micro_batch * recipe.micro_batch)


def evaluation_share(samples: int, rank: int, world_size: int, batch: int) -> range:
    """The samples that ``rank`` evaluates: complete batches of ``batch`` samples, only the split's last one is smaller."""
    batches = shard(-(-samples // batch), rank, world_size)
    return range(batches.start * batch, min(batches.stop * batch, samples))
