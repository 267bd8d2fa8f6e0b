"""Parts of a network that are not trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from worldsize.errors import UserError
from worldsize.models import networks

BACKBONE = "backbone"
_FROZEN = "frozen_parameters"  # attribute of a network: the names of what `freeze` has changed


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that normalizes with its running statistics in training, too, and does not change them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


def freeze(network: nn.Module, parts: tuple[str, ...]) -> None:
    """Do not train these parts: names of modules or parameters, or ``backbone`` for everything but the classifier.

    Their BatchNorm layers keep their running statistics. Names and tensors of the state dict stay the same. `unfreeze` is
    the inverse.

    Raises:
        UserError: there is no such part, it cannot be frozen, or nothing would be left to train.
    """
    frozen: dict[str, None] = {}
    for part in parts:
        named = network.named_parameters(remove_duplicate=False)  # a part may share its parameters with others
        parameters = {name: parameter for name, parameter in named if _is_in(name, part, network)}
        if not parameters:
            names = ", ".join(name for name, _ in network.named_children())
            raise UserError(f"--model.freeze {part}: the network has no such part; its parts are {names}")
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                frozen[name] = None
                parameter.requires_grad_(False)
        for name, layer in network.named_modules():
            if _is_in(name, part, network) and isinstance(layer, _BatchNorm):
                _keep_statistics(layer, name)
    if parts and not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"--model.freeze {' '.join(parts)} leaves nothing to train: leave out one of these parts")
    setattr(network, _FROZEN, tuple(frozen))


def unfreeze(network: nn.Module) -> None:
    """Train again what `freeze` has frozen, and nothing else: a network may have parameters that are never trained."""
    for name in getattr(network, _FROZEN, ()):
        network.get_parameter(name).requires_grad_(True)
    for layer in network.modules():
        if type(layer) is FrozenBatchNorm2d:
            cast(nn.Module, layer).__class__ = nn.BatchNorm2d


@contextmanager
def differentiated(network: nn.Module) -> Iterator[None]:
    """Within this context, the graph of a forward pass contains what is frozen, as it will after `unfreeze`."""
    named = [network.get_parameter(name) for name in getattr(network, _FROZEN, ())]
    frozen = [parameter for parameter in named if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _is_in(name: str, part: str, network: nn.Module) -> bool:
    if part == BACKBONE:
        return not f"{name}.".startswith(networks.classifier_prefixes(network))
    return f"{name}.".startswith(f"{part}.")


def _keep_statistics(layer: _BatchNorm, name: str) -> None:
    if not layer.track_running_stats:
        return  # it has none: it normalizes with those of its input
    if type(layer) is nn.BatchNorm2d:
        layer.__class__ = FrozenBatchNorm2d
    elif not isinstance(layer, FrozenBatchNorm2d):
        raise UserError(f"--model.freeze: {name} is a {type(layer).__name__}, whose statistics cannot be frozen")
