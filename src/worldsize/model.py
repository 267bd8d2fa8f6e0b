"""Models by name, and the BatchNorm handling that data parallelism needs."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torchvision import models
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import StochasticDepth

from worldsize.errors import UserError
from worldsize.ghost import GhostBatchNorm2d
from worldsize.recipe import Recipe
from worldsize.tree import TreeSum
from worldsize.world import World


def names() -> list[str]:
    """All classification models of the installed torchvision."""
    return [str(name) for name in models.list_models(module=models)]


def build(recipe: Recipe, classes: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The recipe's model for ``classes`` classes, initialized from its seed, on ``device``.

    The weights are initialized on the CPU, so they are the same on every device and rank. The state dict uses
    torchvision's names.

    Raises:
        UserError: unknown model, unsupported stem, or weights of another model.
    """
    settings = recipe.model
    torch.manual_seed(recipe.seed)
    model = _construct(settings.name, classes)
    if settings.stem == "cifar":
        _cifar_stem(model, settings.name)
    if settings.zero_init:
        _zero_init(model)
    if settings.weights is not None:
        load_weights(model, settings.weights)
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    model.to(device=device, dtype=dtype)
    model.to(memory_format=layout)  # type: ignore[call-overload]
    return model


def _construct(name: str, classes: int) -> nn.Module:
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"torchvision has no classification model {name!r}{hint}")
    builder: Callable[..., nn.Module] = models.get_model_builder(name)
    options: dict[str, object] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        # With auxiliary heads the output type differs during training, and the recipes define no loss for them.
        options |= {"aux_logits": False, "init_weights": True}
    return builder(weights=None, **options)


def _cifar_stem(model: nn.Module, name: str) -> None:
    """3 x 3 stride 1 without pooling, as in He et al. 2015 (arXiv 1512.03385, section 4.2) for 32 x 32 images."""
    if not isinstance(model, models.ResNet):
        raise UserError(f"--model.stem cifar works only with ResNets, not with {name}; use --model.stem imagenet")
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def _zero_init(model: nn.Module) -> None:
    """Each residual block starts as the identity (Goyal et al. 2017, section 5.1). Other models are unchanged."""
    for module in model.modules():
        if isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
        elif isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict into ``model``. A classifier with a different number of classes keeps its initial weights.

    Raises:
        UserError: the file cannot be read, is not a state dict, or belongs to another model.
    """
    state = _read_state(path)
    own = model.state_dict()
    head = _classifier_prefix(model)
    different = [
        key for key in own.keys() | state.keys() if key not in own or key not in state or own[key].shape != state[key].shape
    ]
    if wrong := sorted(key for key in different if not key.startswith(head)):
        raise UserError(
            f"--model.weights {path} belongs to another model: {len(wrong)} tensors differ, the first is {wrong[0]!r}"
        )
    model.load_state_dict({k: v for k, v in state.items() if k not in different}, strict=False)


def _read_state(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"--model.weights {path}: file not found") from None
    except pickle.UnpicklingError:
        raise UserError(
            f"--model.weights {path} contains objects other than tensors, which is not allowed; save a plain state dict"
        ) from None
    except Exception as error:
        raise UserError(f"--model.weights {path} cannot be read: {error}") from None
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise UserError(f"--model.weights {path} is not a state dict: expected tensors by name")
    return state


def _classifier_prefix(model: nn.Module) -> str:
    """Name of the last linear or convolution layer, which is the classifier in every torchvision model."""
    return [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))][-1] + "."


def takes(model: nn.Module, size: int, micro_batch: int, name: str) -> None:
    """Check that the model accepts micro-batches of ``micro_batch`` images of ``size`` x ``size`` pixels.

    Raises:
        UserError: it does not (vision transformers support one size only; some models need larger images).
    """
    fixed = getattr(model, "image_size", size)
    if fixed != size:
        raise UserError(
            f"{name} requires images of {fixed} pixels, not {size}: "
            f"set --data.train-crop-size and --data.val-crop-size to {fixed}"
        )
    if micro_batch == 1 and norms(model):
        raise UserError(f"{name} uses BatchNorm, which needs more than one sample; pass --micro-batch 2 or more")
    parameter = next(model.parameters())
    was_training = model.training
    try:
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, size, size, device=parameter.device, dtype=parameter.dtype))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UserError(f"{name} does not support images of {size} pixels: {str(error).splitlines()[0]}") from None
    finally:
        model.train(was_training)


def norms(model: nn.Module) -> list[_BatchNorm]:
    """The model's BatchNorm layers that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def draws(model: nn.Module) -> bool:
    """Whether its forward pass in training draws random numbers (dropout, stochastic depth)."""
    modules = list(model.modules())
    return any(m.p > 0 for m in modules if isinstance(m, (_DropoutNd, StochasticDepth))) or any(
        m.dropout > 0 for m in modules if isinstance(m, nn.MultiheadAttention)
    )


class RunningStatistics:
    """BatchNorm's running statistics: moving averages that are updated once per step.

    All micro-batches of a step enter them with equal weight, whichever rank computes them. The layers have momentum 1, so
    a forward pass leaves the mean and the variance of its micro-batch in their buffers; `collect` keeps a sum of these,
    `advance` applies their mean. The layers contain the moving averages only inside `averaged`. Unless a strategy sums
    over all ranks, each rank has moving averages of its own micro-batches; their mean over ranks equals the moving average
    of the means, so ranks exchange them only when they are read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = norms(model)
        self._buffers = [buffer for layer in self._norms for buffer in _statistics(layer)]
        # Of each group of a forward pass; layers that normalize the whole batch have the same statistics in all groups.
        groups = max((layer.groups for layer in self._norms if isinstance(layer, GhostBatchNorm2d)), default=1)
        self._of_groups = [[b for layer in self._norms for b in _statistics(layer, i)] for i in range(groups)]
        self._momentum = _flat([torch.full_like(b, _momentum(layer)) for layer in self._norms for b in _statistics(layer)])
        for layer in self._norms:
            layer.momentum = 1.0
        self._averages = _flat(self._buffers)
        self._sum: TreeSum[torch.Tensor] = TreeSum(torch.Tensor.add_)

    def collect(self, forward: int) -> None:
        """After the forward pass ``forward`` of this step, counted over all ranks: add its statistics to the sum."""
        total = _flat(self._of_groups[0])
        for buffers in self._of_groups[1:]:
            total += _flat(buffers)
        self._sum.push(total / len(self._of_groups) if len(self._of_groups) > 1 else total, forward)

    def take(self) -> list[torch.Tensor]:
        """The sums over this rank's micro-batches of the step as nodes of `worldsize.tree`, each (n,)."""
        return self._sum.take()

    def advance(self, mean: torch.Tensor) -> None:
        """Apply one step, given the mean (n,) of its micro-batches."""
        self._averages.mul_(1 - self._momentum).add_(self._momentum * mean)

    @property
    def size(self) -> int:
        """n, the number of values."""
        return self._averages.numel()

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's moving averages by layer number; references, not copies."""
        parts = self._averages.split([b.numel() for b in self._buffers])
        return {f"{i // 2}.{('mean', 'var')[i % 2]}": part for i, part in enumerate(parts)}

    def load_from_model(self) -> None:
        """Take the values in the layers, such as those of a checkpoint, as the moving averages."""
        self._averages.copy_(_flat(self._buffers))

    @contextmanager
    def averaged(self, world: World, step: int) -> Iterator[None]:
        """Within this context the model has the mean over all ranks and ``num_batches_tracked`` is ``step``."""
        for layer in self._norms:
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(step)
        mean = self._averages.clone()
        average([mean], world)
        for buffer, part in zip(self._buffers, mean.split([b.numel() for b in self._buffers]), strict=True):
            buffer.copy_(part)
        yield  # afterwards the next forward pass overwrites them


def _statistics(layer: _BatchNorm, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Its running mean and variance, or those of a later group of the last batch."""
    if isinstance(layer, GhostBatchNorm2d):
        return layer.statistics(group)
    assert layer.running_mean is not None and layer.running_var is not None
    return layer.running_mean, layer.running_var


def _momentum(layer: _BatchNorm) -> float:
    assert layer.momentum is not None, "cumulative averages of BatchNorm are not supported"
    return layer.momentum


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All tensors concatenated, a copy, (n,)."""
    return torch.cat(tensors) if tensors else torch.zeros(0)


def average(tensors: list[torch.Tensor], world: World) -> None:
    """Replace the tensors by their mean over all ranks, with a single all-reduce."""
    if world.size == 1 or not tensors:
        return
    import torch.distributed as dist

    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    flat /= world.size
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def parameter_kinds(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(weights of linear, convolution and similar layers; norm parameters and biases), by module type, not by name."""
    weights: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module in model.modules():
        is_norm = isinstance(module, (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm))
        for parameter in module.parameters(recurse=False):
            (others if is_norm or parameter.ndim <= 1 else weights).append(parameter)
    return weights, others
