"""What fits into a GPU's memory, for the message when something did not."""

from __future__ import annotations

from collections.abc import Callable

from worldsize.config.recipe import Recipe
from worldsize.training.gradients import GradientComputer

BEFORE_TRAINING = (
    "the GPU is full before training begins: stop what else uses it (nvidia-smi lists it), or use a smaller --model.name, "
    "fewer processes per GPU, or a GPU with more memory"
)
SNAPSHOT = (
    "saving needs room for a copy of the weights and the optimizer's state on the GPU, next to training: add a smaller "
    "--forward-batch, or lower --micro-batch"
)


def remedy(compute: GradientComputer) -> str:
    """What to change after a forward or backward pass ran out of memory. Tries smaller ones on the device."""
    plan = compute.plan
    failed = plan.micro_batch * plan.groups
    step, flag = (plan.micro_batch, "--forward-batch") if plan.groups > 1 else (1, "--micro-batch")
    if fitting := largest_batch(compute.fits, failed, step):
        return f"a forward pass of {failed} images is too large, one of {fitting} fits: add {flag} {fitting}"
    smaller = f"--micro-batch to less than {step}, or " if step > 1 else ""
    return f"not even a forward pass of {step} images fits: lower {smaller}--data.train-crop-size"


def of_evaluation(batch: int, recipe: Recipe) -> str:
    """What to change after an evaluation with ``batch`` images per forward pass ran out of memory."""
    too_large = f"an evaluation of {batch} images at a time is too large"
    if batch > recipe.micro_batch:
        return f"{too_large}: add a smaller --forward-batch, a multiple of --micro-batch {recipe.micro_batch}"
    return f"{too_large}: lower --micro-batch or --data.val-crop-size"


def largest_batch(fits: Callable[[int], bool], failed: int, multiple: int) -> int | None:
    """The largest batch below ``failed`` that fits, found by halving; None if none does.

    Args:
        fits: tries a forward and backward pass with so many samples.
        multiple: the result is a multiple of it.
    """
    batch = failed // 2 // multiple * multiple
    while batch >= multiple:
        if fits(batch):
            return batch
        batch = batch // 2 // multiple * multiple
    return None
