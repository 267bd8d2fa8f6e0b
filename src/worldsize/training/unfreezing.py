"""Parts of the network that begin to train in the middle of a run (``model.unfreeze_epoch``)."""

from __future__ import annotations

import torch

from worldsize.config.recipe import Model
from worldsize.models import freezing, ghost_batchnorm
from worldsize.optim import optimizers
from worldsize.training.gradients import GradientComputer
from worldsize.training.progress import Progress


def due(settings: Model, progress: Progress) -> bool:
    """Whether the frozen parts begin to train with the next step."""
    return (progress.epoch, progress.epoch_step) == (settings.unfreeze_epoch, 0)


def done(settings: Model, progress: Progress) -> bool:
    """Whether they have trained already, in the last step or before."""
    epoch = settings.unfreeze_epoch
    return epoch is not None and (progress.epoch, progress.epoch_step) > (epoch, 0)


def unfreeze(compute: GradientComputer) -> None:
    """Train the frozen parts from the next step on. All ranks must call it, then rehearse.

    These parts get a fresh optimizer state, as at the beginning of a run. Weights, statistics, and the state of what trained
    before keep their values. A run that resumes later calls it too, so that it has the same groups and buckets.
    """
    recipe, plan, state = compute.recipe, compute.plan, compute.state
    freezing.unfreeze(state.model)
    if ghost_batchnorm.wanted(plan, compute.device):
        ghost_batchnorm.split_norms(state.model, plan.micro_batch, plan.groups)
    optimizers.add_parameters(state.optimizer, state.model, recipe.optimizer)
    if state.compiled:
        torch.compiler.reset()  # its code is for the frozen network
    state.strategy.parameters_added()
    # After the strategy, which may replace the network's norm layers (SyncBatchNorm).
    if state.averaging is not None:
        state.averaging.extend(state.model)
    else:
        state.statistics.extend(state.model)
    compute.capture_again()
