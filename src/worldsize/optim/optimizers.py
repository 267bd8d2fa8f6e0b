"""Optimizers and their parameter groups."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from worldsize.config.recipe import Optimizer
from worldsize.errors import CheckpointError
from worldsize.models import networks
from worldsize.models.factory import parameter_kinds
from worldsize.optim.layerwise import Lamb, Lars
from worldsize.optim.lion import Lion
from worldsize.optim.muon import Muon
from worldsize.optim.nadamw import NAdamW
from worldsize.optim.sgdw import Sgdw

# What the optimizers keep of a parameter, in the order of their first step.
_KINDS = ("step", "exp_avg", "exp_avg_sq", "square_avg", "momentum_buffer")


def build(
    model: nn.Module, settings: Optimizer, device: torch.device, captured: bool = False, peak: float | None = None
) -> torch.optim.Optimizer:
    """The recipe's optimizer, with one group each for weights, biases and the parameters of norm layers.

    Args:
        captured: a CUDA graph contains its steps, so the learning rate is a tensor on the device (float32).
        peak: the run's peak learning rate (default: the recipe's lr).
    """
    optimizer = _build(model, settings, device, captured, peak or settings.lr)
    if captured:
        # The steps before the capture, which warm up, are meant to run without it.
        warnings.filterwarnings("ignore", ".*capturable=True.* is running without CUDA graph capture", UserWarning)
        for group in optimizer.param_groups:
            group["lr"] = torch.full((), settings.lr, device=device)
    return optimizer


def _build(
    model: nn.Module, settings: Optimizer, device: torch.device, captured: bool, peak: float
) -> torch.optim.Optimizer:
    groups = _groups(model, settings)
    match settings.name:
        case "adamw":
            eps = settings.eps or 1e-8
            return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=eps, fused=True, capturable=captured)
        case "rmsprop":
            eps = settings.eps or 1e-8
            return torch.optim.RMSprop(
                groups, lr=settings.lr, alpha=settings.alpha, eps=eps, momentum=settings.momentum, foreach=True
            )
        case "sgdw":
            return Sgdw(groups, settings.lr, settings.momentum, settings.nesterov, peak)
        case "lars":
            return Lars(groups, settings.lr, settings.momentum, settings.trust)
        case "lamb":
            return Lamb(groups, settings.lr, settings.betas, settings.eps or 1e-6)
        case "nadamw":
            return NAdamW(groups, settings.lr, settings.betas, settings.eps or 1e-8)
        case "lion":
            return Lion(groups, settings.lr, settings.betas)
        case "muon":
            eps = settings.eps or 1e-8
            return Muon(groups, settings.lr, settings.momentum, settings.nesterov, settings.betas, eps)
        case _:
            return _sgd(groups, settings, device)


def _groups(model: nn.Module, settings: Optimizer) -> list[dict[str, Any]]:
    """Groups of trained parameters with the same weight decay and the same learning rate, ``lr_scale`` times the run's."""
    weights, biases, others = parameter_kinds(model)
    bias_decay = settings.norm_weight_decay if settings.bias_weight_decay is None else settings.bias_weight_decay
    vectors = [(biases, bias_decay, False), (others, settings.norm_weight_decay, False)]
    kinds = [(weights, settings.weight_decay, True), *vectors]
    if settings.name == "muon":
        heads = {p for layer in networks.classifiers(model).values() for p in layer.parameters()}
        matrices = [p for p in weights if p.ndim in (2, 4) and p not in heads]
        rest = [p for p in weights if p.ndim not in (2, 4) or p in heads]
        kinds = [(matrices, settings.weight_decay, True), (rest, settings.weight_decay, False), *vectors]
    scales = _lr_scales(model, settings)
    groups = []
    for parameters, decay, adapt in kinds:
        trained = [p for p in parameters if p.requires_grad]
        for scale in dict.fromkeys(scales[p] for p in trained):
            own = [p for p in trained if scales[p] == scale]
            groups.append({"params": own, "weight_decay": decay, "adapt": adapt, "lr_scale": scale})
    return groups


def add_parameters(optimizer: torch.optim.Optimizer, model: nn.Module, settings: Optimizer) -> None:
    """Let the recipe's optimizer also update what the model trains now and did not before, from a fresh state.

    It gets groups of its own.
    """
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    lr = optimizer.param_groups[0]["lr"]
    for group in _groups(model, settings):
        new = [parameter for parameter in group["params"] if parameter not in known]
        if new:
            own = lr.clone() if isinstance(lr, torch.Tensor) else lr
            optimizer.add_param_group(group | {"params": new, "lr": own})
    if type(optimizer) is torch.optim.SGD:
        zero_momentum(optimizer)


def _lr_scales(model: nn.Module, settings: Optimizer) -> dict[nn.Parameter, float]:
    """Each parameter's learning rate relative to the run's: ``layer_decay`` to the power of its depth, and ``head_lr``."""
    if settings.layer_decay == settings.head_lr == 1:
        return dict.fromkeys(model.parameters(), 1.0)
    depths = networks.depths(model) if settings.layer_decay != 1 else {}
    heads = networks.classifier_prefixes(model)
    return {
        parameter: settings.layer_decay ** depths.get(name, 0) * (settings.head_lr if name.startswith(heads) else 1.0)
        for name, parameter in model.named_parameters()
    }


def _sgd(groups: list[dict[str, Any]], settings: Optimizer, device: torch.device) -> torch.optim.Optimizer:
    # On CPUs torch's fused SGD takes 1.5 times as long as the foreach implementation (torch 2.12, ResNet-50, one thread).
    fast = {"fused": True} if device.type == "cuda" else {"foreach": True}
    sgd = torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov, **fast)
    zero_momentum(sgd)
    return sgd


def zero_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the momentum of SGD, zeros, before the first step of a parameter.

    The first step copies the gradient into new buffers; zeros give the same. But fused SGD with a loss scale skips a step
    that overflows, as the first one often does, and would leave new buffers uninitialized.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            if "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` for the next step, in each group times its own factor."""
    for group in optimizer.param_groups:
        scaled = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's state as ``KIND/PARAMETER`` (``momentum_buffer/conv1.weight``).

    In the order of the groups, and of a parameter in that of `_KINDS`, whether the state was loaded or not.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{kind}/{names[parameter]}": torch.as_tensor(state[kind])
        for group in optimizer.param_groups
        for parameter in group["params"]
        for state in [optimizer.state.get(parameter, {})]
        for kind in sorted(state, key=_KINDS.index)
        if state[kind] is not None
    }


def load_state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `state_tensors`.

    Raises:
        CheckpointError: a tensor belongs to a parameter that the model does not have.
    """
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in parameters:
            raise CheckpointError(f"the saved optimizer has a parameter {name!r} that this model does not have")
        parameter = parameters[name]
        if value.shape == parameter.shape:
            # Use the parameter's memory layout, as the optimizer itself does.
            value = torch.empty_like(parameter, requires_grad=False).copy_(value)
        elif kind == "step" and optimizer.defaults.get("fused"):
            value = value.to(parameter.device)
        optimizer.state[parameter][kind] = value
    if isinstance(optimizer, torch.optim.RMSprop):
        _add_momentum(optimizer)


def _add_momentum(optimizer: torch.optim.RMSprop) -> None:
    """Allocate the momentum, zeros, of parameters whose state is that of a run without it: torch would not find it."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if optimizer.state.get(parameter):  # torch allocates a fresh one
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter, requires_grad=False))
