"""A trial of a network of the user's own in training, before the run begins."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from worldsize.config.recipe import Recipe, own_network
from worldsize.distributed import device_errors
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import factory, freezing
from worldsize.models.freezing import FrozenBatchNorm2d
from worldsize.models.networks import from_file

log = logging.getLogger(__name__)
_PASSES = 16  # tried to see what a network leaves out


class Trial(NamedTuple):
    """What a forward pass has returned and done.

    Attributes:
        output: what it returned.
        changes: the buffers that it changed by layer, without BatchNorm's statistics.
        drew: whether it drew random numbers from torch, Python or NumPy.
        drew_on_host: whether some of them were not drawn on a GPU.
    """

    output: object
    changes: list[str]
    drew: bool
    drew_on_host: bool


class Skips(NamedTuple):
    """Whether forward passes in training leave out parameters that are trained, by chance.

    Attributes:
        now: with the parts that are trained at the beginning.
        later: with all parts that will be trained, after ``model.unfreeze_epoch``.
    """

    now: bool
    later: bool


def check(network: nn.Module, recipe: Recipe, classes: int, world: World, refuses: bool) -> None:
    """Check that the network can be trained, and that its numbers do not depend on how many processes share a step.

    They do if each forward pass changes some state. On one process such a network trains and resumes as in torch, which is
    only worth a warning.

    Args:
        refuses: refuse a network with such state.

    Raises:
        UserError: names the layers, or what a forward pass in training does, or the setting that does not go with it.
    """
    if not own_network.is_own(recipe.model.name):  # those of libraries train, and have no such state
        return
    _check_momenta(network, recipe)
    try:
        with _uses_counted(network) as uses:
            output, layers, *_ = tried(network, recipe.data.train_crop_size, recipe.micro_batch)
    except Exception as error:
        if device_errors.is_of_device(error):
            raise
        raise from_file.explained(error, recipe.model.name, "a forward pass in training: ") from None
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if shape != (recipe.micro_batch, classes):
        raise UserError(
            f"{recipe.model.name} returned {shape} in training for {recipe.micro_batch} images: it must return the "
            f"logits of {classes} classes, (n, {classes}), as in evaluation"
        )
    for name, count in uses.items():
        if count > 1 and world.is_main:
            log.warning(
                "%s: a forward pass uses %s %d times, and its running statistics are those of the last use only, so "
                "evaluations differ from torch's: use a layer of its own in each place",
                *(recipe.model.name, _layer(network, name), count),
            )
    if world.is_main and tried(network, recipe.data.val_crop_size, 1, training=False).drew:
        log.warning(
            "%s draws random numbers in evaluation, so no two evaluations are equal: draw only `if self.training`",
            recipe.model.name,
        )
    if layers:
        _refuse_or_warn(recipe, layers, world, refuses)
    if recipe.parallel.static_graph and world.size > 1 and skips(network, recipe).later:
        raise UserError(
            f"{recipe.model.name} leaves out layers by chance in training, so its graph changes: leave out "
            "--parallel.static-graph, or pass --parallel.no-static-graph if the recipe or the run has it"
        )


def _check_momenta(network: nn.Module, recipe: Recipe) -> None:
    unfreezes = recipe.model.unfreeze_epoch is not None
    for name, layer in network.named_modules():
        follows = isinstance(layer, _BatchNorm) and (unfreezes or not isinstance(layer, FrozenBatchNorm2d))
        if follows and layer.track_running_stats and layer.momentum is None:
            raise UserError(
                f"{recipe.model.name}: {_layer(network, name)} has momentum=None, a cumulative average, which is not "
                "supported: give it a momentum, such as 0.1"
            )


def _refuse_or_warn(recipe: Recipe, layers: list[str], world: World, refuses: bool) -> None:
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


def draws(network: nn.Module, recipe: Recipe) -> bool:
    """Whether a forward pass in training draws random numbers; a network of the user's own may call functions that do."""
    if factory.uses_random_draws(network):
        return True
    own = own_network.is_own(recipe.model.name)
    return own and tried(network, recipe.data.train_crop_size, recipe.micro_batch).drew


def draws_on_host(network: nn.Module, recipe: Recipe) -> bool:
    """Whether a forward pass in training of a network of the user's own draws random numbers elsewhere than on a GPU."""
    own = own_network.is_own(recipe.model.name)
    return own and tried(network, recipe.data.train_crop_size, recipe.micro_batch).drew_on_host


def skips(network: nn.Module, recipe: Recipe) -> Skips:
    """Whether forward passes in training of a network of the user's own leave out parameters by chance.

    Of parameters that are left out rarely, the passes tried here may show none. The same answer on all ranks.

    Args:
        network: as at the beginning of a run, also of one that resumes after its parts have begun to train.
    """
    if not own_network.is_own(recipe.model.name) or not draws(network, recipe):
        return Skips(False, False)
    now = len(_used(network, recipe)) > 1
    if now or recipe.model.unfreeze_epoch is None:
        return Skips(now, now)
    with freezing.differentiated(network):
        return Skips(now, len(_used(network, recipe)) > 1)


def _used(network: nn.Module, recipe: Recipe) -> set[frozenset[int]]:
    """What `_parameters_behind` finds behind the outputs of some forward passes in training."""
    used = set()
    with _kept(network):
        for number in range(_PASSES):
            torch.manual_seed(number)
            from_file.seed(number)
            output = network.train()(_noise(network, recipe.data.train_crop_size, min(recipe.micro_batch, 2)))
            used.add(_parameters_behind(output))
    return used


def _parameters_behind(output: torch.Tensor) -> frozenset[int]:
    """The parameters that ``output`` depends on, by their identity; without those that are frozen."""
    waiting, seen, found = [output.grad_fn], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # a leaf
            found.add(id(node.variable))
        waiting += [behind for behind, _ in node.next_functions]
    return frozenset(found)


def tried(network: nn.Module, size: int, images: int, training: bool = True) -> Trial:
    """Try a forward pass with ``images`` images of ``size`` pixels. The network is the same afterwards."""
    statistics = {id(buffer) for layer in factory.norms(network) for buffer in layer.buffers(recurse=False)}
    found: defaultdict[str, list[str]] = defaultdict(list)
    with _kept(network) as buffers:
        pixels = _noise(network, size, images)
        before, on_gpu = _host_generators(), _gpu_generator(pixels.device)
        with torch.no_grad():
            output = network.train(training)(pixels)
        drew_on_host = _host_generators() != before
        drew = drew_on_host or _gpu_generator(pixels.device) != on_gpu
        for name, buffer in network.named_buffers():
            if name in buffers and id(buffer) not in statistics and not torch.equal(buffer, buffers[name]):
                module, _, own = name.rpartition(".")
                found[module].append(own)
    changes = [f"{', '.join(names)} of {_layer(network, module)}" for module, names in found.items()]
    return Trial(output, changes, drew, drew_on_host)


def _noise(network: nn.Module, size: int, images: int) -> torch.Tensor:
    """Images for the network, (images, 3, size, size), always the same."""
    parameter = next(network.parameters())
    pixels = torch.rand(images, 3, size, size, generator=torch.Generator().manual_seed(0))
    return pixels.to(parameter.device, parameter.dtype)


def _host_generators() -> list[object]:
    """The states of the generators of torch's CPU, Python and NumPy."""
    name, key, *others = np.random.get_state()
    return [torch.get_rng_state().numpy().tobytes(), random.getstate(), name, np.asarray(key).tobytes(), others]


def _gpu_generator(device: torch.device) -> bytes:
    """The state of a GPU's generator; nothing of a CPU."""
    return torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""


def _layer(network: nn.Module, name: str) -> str:
    return f"{name or 'the network'} ({type(network.get_submodule(name)).__name__})"


@contextmanager
def _uses_counted(network: nn.Module) -> Iterator[Counter[str]]:
    """Yields how often each BatchNorm layer that updates running statistics has been called within this context."""
    uses: Counter[str] = Counter()
    followed = set(factory.norms(network))
    layers = [(name, layer) for name, layer in network.named_modules() if layer in followed]
    hooks = [layer.register_forward_hook(lambda *_, name=name: uses.update([name])) for name, layer in layers]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _kept(network: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yields copies of the buffers. The network and the generators are the same afterwards."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    was_training = network.training
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = sorted({p.device.index for p in network.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield buffers
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        network.train(was_training)
        for name, buffer in network.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:  # the first pass may create some
                buffer.detach().copy_(buffers[name])
