"""What fits into a GPU's memory: for the message when something did not, and to choose the batch of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan, device_errors
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.models import factory
from worldsize.training.gradients import GradientComputer, blank
from worldsize.training.objective import Objective

BEFORE_TRAINING = (
    "the GPU is full before training begins: stop what else uses it (nvidia-smi lists it), or use a smaller --model.name, "
    "fewer processes per GPU, or a GPU with more memory"
)


@dataclass(frozen=True)
class Trial:
    """Tries forward and backward passes of other sizes on the device, without changing anything.

    ``label`` is one without meaning, see `GradientComputer`; ``size`` that of the images in pixels.
    """

    objective: Objective
    label: torch.Tensor
    size: int
    device: torch.device

    def fits(self, samples: int, reserved: int = 0) -> bool:
        """Whether forward and backward of ``samples`` images fit, next to what is there and ``reserved`` bytes."""
        parameters = [p for p in self.objective.network.parameters() if p.requires_grad]
        try:
            kept = torch.empty(reserved, dtype=torch.uint8, device=self.device)
            pixels = torch.zeros(samples, self.size, self.size, 3, dtype=torch.uint8)
            losses, _ = self.objective(pixels, blank(self.label, samples).to(self.device))
            # Without the strategy's hooks, which would send.
            torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
            del kept
            return True
        except RuntimeError as error:
            if not device_errors.is_full(error):
                raise
            return False
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def remedy(compute: GradientComputer) -> str:
    """What to change after a forward or backward pass ran out of memory: tries on the device what the recipe accepts."""
    plan, recipe = compute.plan, compute.recipe
    failed = plan.micro_batch * plan.groups
    trial = Trial(compute.state.objective, compute.label, recipe.data.train_crop_size, compute.device)
    merged = [n for n in batch_plan.forward_batches(plan) if n < failed]
    if fitting := largest(trial.fits, merged):
        return f"a forward pass of {failed} images is too large, one of {fitting} fits: add --forward-batch {fitting}"
    norms = factory.norms(compute.state.model, frozen=recipe.model.unfreeze_epoch is not None)
    smaller = micro_batches(recipe, plan, norms != [])
    if fitting := largest(trial.fits, smaller):
        # Without it, a forward pass would again have as many micro-batches as usually fit.
        flags = f"--micro-batch {fitting} --forward-batch {fitting}"
        return f"a forward pass of {failed} images is too large, one of {fitting} fits: add {flags}"
    least = min([failed, *smaller])
    return f"not even a forward pass of {least} images fits: lower --data.train-crop-size, or use a smaller --model.name"


def micro_batches(recipe: Recipe, plan: BatchPlan, norms: bool) -> list[int]:
    """The micro-batches smaller than the plan's that this run could have, ascending.

    Args:
        norms: the network has, or will have, BatchNorm in training, which has no statistics of one sample.
    """
    share = plan.per_process // plan.devices
    smaller = [n for n in batch_plan.divisors(share) if (2 if norms else 1) <= n < plan.micro_batch]
    world, devices = plan.world_size, plan.devices
    return [n for n in smaller if batch_plan.works(recipe, {"micro_batch": n, "forward_batch": n}, world, devices)]


def of_evaluation(batch: int, recipe: Recipe, plan: BatchPlan | None = None) -> str:
    """What to change after an evaluation with ``batch`` images per forward pass ran out of memory.

    Args:
        plan: of the run that evaluates; None: only an evaluation, which takes every multiple of the micro-batch.
    """
    too_large = f"an evaluation of {batch} images at a time is too large"
    if batch <= recipe.micro_batch:
        return f"{too_large}: lower --micro-batch or --data.val-crop-size"
    if plan is None:
        return f"{too_large}: add a smaller --forward-batch, a multiple of --micro-batch {recipe.micro_batch}"
    return f"{too_large}: add --forward-batch {_smaller(plan, batch)}"


def of_snapshot(plan: BatchPlan) -> str:
    """What to change after a copy of the state ran out of memory."""
    needs = "saving needs room for a copy of the weights and the optimizer's state on the GPU, next to training"
    if plan.groups == 1:
        return f"{needs}: lower --micro-batch or --data.train-crop-size"
    return f"{needs}: add --forward-batch {_smaller(plan, plan.micro_batch * plan.groups)}"


def _smaller(plan: BatchPlan, failed: int) -> int:
    """The largest forward pass that the run accepts and that is at most half as large as one that failed, if any is."""
    # A network whose micro-batches cannot be merged accepts only one of them.
    accepted = batch_plan.forward_batches(plan) if plan.groups > 1 else [plan.micro_batch]
    return max((n for n in accepted if n <= failed // 2), default=plan.micro_batch)


def largest(fits: Callable[[int], bool], candidates: Sequence[int]) -> int | None:
    """The largest of the ascending candidates that fits, found by bisection; None if none does."""
    low, high = -1, len(candidates)  # of all that were tried, low fits and high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(candidates[middle]) else (low, middle)
    return candidates[low] if low >= 0 else None


def smaller_plan(plan: BatchPlan, fits: Callable[[int], bool]) -> BatchPlan:
    """The plan with the largest forward pass that fits and is no larger than its own.

    If none does it is the same: training then fails, and its error says what to change.
    """
    own = plan.micro_batch * plan.groups
    if fits(own):
        return plan
    found = largest(fits, [n for n in batch_plan.forward_batches(plan) if n < own])
    return plan if found is None else batch_plan.with_forward_batch(plan, found)
