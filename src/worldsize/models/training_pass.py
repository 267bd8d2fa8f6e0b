"""A trial of a network of the user's own in training, before the run begins."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from worldsize.config.recipe import Recipe, own_network
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import factory

log = logging.getLogger(__name__)


def check(network: nn.Module, recipe: Recipe, world: World, refuses: bool) -> None:
    """Look for state that changes in each forward pass: its numbers depend on how many processes share a step.

    On one process such a network trains and resumes as in torch, which is only worth a warning.

    Args:
        refuses: refuse such a network.

    Raises:
        UserError: names the layers.
    """
    if not own_network.is_own(recipe.model.name):  # those of libraries have no such state
        return
    layers = changing(network, recipe.data.train_crop_size, min(2, recipe.micro_batch))
    if not layers:
        return
    message = (
        f"{recipe.model.name}: each forward pass in training changes {'; '.join(layers)}. Of such state, only BatchNorm's "
        "running statistics are combined over processes and micro-batches, so the numbers depend on how many there are"
    )
    if refuses:
        raise UserError(
            f"{message}. Use a layer without it (GroupNorm, or InstanceNorm without track_running_stats), or train in one "
            "process, with a strategy other than bitwise"
        )
    if world.is_main:
        log.warning("%s", message)


def changing(network: nn.Module, size: int, images: int) -> list[str]:
    """The layers with buffers that a forward pass in training changes, and these, without the statistics of BatchNorm.

    The network is the same afterwards.
    """
    statistics = {id(buffer) for layer in factory.norms(network) for buffer in layer.buffers(recurse=False)}
    found: defaultdict[str, list[str]] = defaultdict(list)
    with _kept(network) as buffers:
        parameter = next(network.parameters())
        pixels = torch.rand(images, 3, size, size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            network.train()(pixels.to(parameter.device, parameter.dtype))
        for name, buffer in network.named_buffers():
            if name in buffers and id(buffer) not in statistics and not torch.equal(buffer, buffers[name]):
                module, _, own = name.rpartition(".")
                found[module].append(own)
    return [_told(network, module, names) for module, names in found.items()]


def _told(network: nn.Module, module: str, buffers: list[str]) -> str:
    layer = network.get_submodule(module)
    return f"{', '.join(buffers)} of {module or 'the network'} ({type(layer).__name__})"


@contextmanager
def _kept(network: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yields copies of the buffers. The network and torch's generators are the same afterwards."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    was_training = network.training
    devices = sorted({p.device.index for p in network.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield buffers
    finally:
        network.train(was_training)
        for name, buffer in network.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:  # the first pass may create some
                buffer.detach().copy_(buffers[name])
