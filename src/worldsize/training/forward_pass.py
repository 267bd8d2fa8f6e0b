"""How many micro-batches a forward pass has, if the recipe does not say."""

from __future__ import annotations

import copy
import logging

import torch
from torch import nn

from worldsize import parallel
from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.distributed import batch_plan
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import freezing, ghost_batchnorm, training_pass
from worldsize.training.objective import Objective
from worldsize.training.out_of_memory import Trial, smaller_plan
from worldsize.training.precision import Precision
from worldsize.training.supervision import Supervision

log = logging.getLogger(__name__)


def default_plan(recipe: Recipe, plan: BatchPlan, network: nn.Module, device: str) -> BatchPlan:
    """The plan with large forward passes on a GPU, unless the recipe says how large they are.

    Raises:
        UserError: the recipe asks for several micro-batches in a forward pass, and the network's numbers would depend on it.
    """
    because = "draws random numbers (dropout, stochastic depth)" if training_pass.draws(network, recipe) else ""
    if not ghost_batchnorm.splits(network):
        because = "has BatchNorm layers of an unknown type, which compute statistics"
    if because and plan.groups > 1:
        raise UserError(
            f"--forward-batch {recipe.forward_batch}: {recipe.model.name} {because} for each forward pass, so its numbers "
            "would depend on it. Leave it out, or raise --micro-batch"
        )
    if because:
        return plan
    alone = not parallel.strategy_class(recipe.parallel).allows_merged_forward(recipe.parallel)
    if recipe.forward_batch is not None or alone or device != "cuda":
        return plan
    return batch_plan.with_largest_forward_batch(plan, batch_plan.GPU_BATCH)


def fitting_plan(
    recipe: Recipe,
    plan: BatchPlan,
    network: nn.Module,
    world: World,
    precision: Precision,
    aims: Supervision,
    label: torch.Tensor,
) -> BatchPlan:
    """The plan with smaller forward passes, the same on all ranks, if those of the default do not fit into a GPU.

    A deterministic run keeps the default: what fits depends on what else uses the GPU, and the bits on what was chosen.
    """
    chosen = recipe.forward_batch is not None or recipe.deterministic or parallel.strategy_class(recipe.parallel).same_bits
    if chosen or plan.groups == 1 or world.device.type != "cuda":
        return plan
    trial = _trial(recipe, plan, copy.deepcopy(network), precision, aims, label)
    reserved = 3 * sum(p.numel() * p.element_size() for p in network.parameters())  # two of the optimizer, one of an average
    plans = world.gather(smaller_plan(plan, lambda n: trial.fits(n, reserved)))
    fitting: BatchPlan = min(plans, key=lambda one: one.groups)
    if fitting.groups < plan.groups and world.is_main:
        own, lower = plan.micro_batch * plan.groups, fitting.micro_batch * fitting.groups
        log.warning(
            "forward passes of %d images instead of %d, because of the GPU's memory; the numbers are the same "
            "up to rounding",
            lower,
            own,
        )
    return fitting


def _trial(
    recipe: Recipe, plan: BatchPlan, network: nn.Module, precision: Precision, aims: Supervision, label: torch.Tensor
) -> Trial:
    if recipe.model.unfreeze_epoch is not None:
        freezing.unfreeze(network)  # from then on, it needs the most
    ghost_batchnorm.split_norms(network, plan.micro_batch, plan.groups)
    normalise = Normalise(recipe.data, precision.device, precision.weights)
    objective = Objective(network.train(), normalise, precision, recipe, aims.class_weights, aims.teacher)
    return Trial(objective, label, recipe.data.train_crop_size, precision.device)
