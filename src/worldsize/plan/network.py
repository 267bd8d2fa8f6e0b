"""The recipe's network as the cost model sees it: gradients in the order of the backward pass, work, and memory.

The network runs once on torch's meta device, which computes shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.models import freezing, networks
from worldsize.plan.traffic import Tensor

# Reading and writing one output element takes about as long as this many multiply-adds: current GPUs do 100 to 300
# floating-point operations in the time in which they move one 16-bit number from and to their memory.
_ELEMENT = 64
_PROBE = 2  # images; BatchNorm needs two


@dataclass(frozen=True)
class Network:
    """``multiply_adds`` (forward) and ``activation_elements`` are per image of the training size.

    ``tensors`` are the gradients in the order in which the backward pass completes them; ``parameters`` counts all
    parameters, also frozen ones. Activations are what the backward pass keeps.
    """

    tensors: tuple[Tensor, ...]
    parameters: int
    multiply_adds: float
    activation_elements: float


@dataclass
class _Call:
    """One module in the order of the forward pass: its own parameters and its work per image."""

    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    multiply_adds: float = 0.0
    elements: float = 0.0

    @property
    def work(self) -> float:
        return self.multiply_adds + _ELEMENT * self.elements


def profile(recipe: Recipe, classes: int) -> Network:
    """Profile the recipe's network for ``classes`` classes at its training size.

    The time of a layer in the backward pass is taken as proportional to its multiply-adds plus a constant per output
    element, so layers with many weights and little work, such as VGG's, complete early.

    Raises:
        UserError: unknown network, or a setting or an image size that it does not support.
    """
    with torch.device("meta"):
        network = networks.build(recipe, classes)
    freezing.freeze(network, recipe.model.freeze)
    if recipe.model.unfreeze_epoch is not None:
        freezing.unfreeze(network)  # from then on, it sends and keeps the most
    size = recipe.data.train_crop_size
    try:
        calls, kept = _run(network.train(), torch.zeros(_PROBE, 3, size, size, device="meta"))
    except (RuntimeError, NotImplementedError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"plan cannot run {recipe.model.name} on shapes of {size} pixels: {reason}") from None
    _attach(network, calls)
    total = sum(call.work for call in calls.values()) or 1.0
    tensors, done = [], 0.0
    for call in reversed(list(calls.values())):
        done += call.work
        trained = [(name, p) for name, p in reversed(call.parameters) if p.requires_grad]
        tensors += [Tensor(name, tuple(p.shape), min(1.0, done / total)) for name, p in trained]
    return Network(
        tensors=tuple(tensors),
        parameters=sum(p.numel() for p in network.parameters()),
        multiply_adds=sum(call.multiply_adds for call in calls.values()),
        activation_elements=kept,
    )


def _run(network: nn.Module, images: torch.Tensor) -> tuple[dict[str, _Call], float]:
    """The calls by module name, and the elements that the backward pass keeps, per image."""
    calls: dict[str, _Call] = {}
    weights = {_storage(p) for p in network.parameters()}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # a storage that is freed could pass its address on

    def begins(name: str) -> Any:
        return lambda *_: calls.setdefault(name, _Call()) and None

    def ends(name: str) -> Any:
        return lambda module, _, output: _measure(calls[name], module, output)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in weights:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes() // tensor.element_size()
            alive.append(tensor)
        return tensor

    hooks = []
    for name, module in network.named_modules():
        hooks += [module.register_forward_pre_hook(begins(name)), module.register_forward_hook(ends(name))]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(images)
    for hook in hooks:
        hook.remove()
    return calls, sum(kept.values()) / len(images)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _measure(call: _Call, module: nn.Module, output: Any) -> None:
    """Add the work of one call of ``module``, per image. Containers only pass on what their parts compute."""
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    direct = list(module.parameters(recurse=False))
    if not isinstance(output, torch.Tensor) or (not direct and any(module.children())):
        return
    call.elements += output.numel() / _PROBE
    matrices: list[torch.Tensor] = [p for p in direct if p.ndim >= 2]
    if isinstance(module, nn.MultiheadAttention):
        matrices.append(module.out_proj.weight)
    elif not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        return  # scales and embeddings are added or multiplied once
    channels = output.shape[1] if isinstance(module, nn.modules.conv._ConvNd) else output.shape[-1]
    call.multiply_adds += sum(p.numel() for p in matrices) * output.numel() / channels / _PROBE


def _attach(network: nn.Module, calls: dict[str, _Call]) -> None:
    """Give each parameter to the call of its module, or of the nearest module around it that was called."""
    for name, parameter in network.named_parameters():
        owner = name.rpartition(".")[0]
        while owner and owner not in calls:
            owner = owner.rpartition(".")[0]
        calls[owner].parameters.append((name, parameter))
