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
from torchvision import models
from torchvision.models.resnet import BasicBlock, Bottleneck

from worldsize.errors import UserError
from worldsize.recipe import Recipe
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


class RunningStatistics:
    """BatchNorm's running statistics, made independent of the world size without communication.

    All micro-batches of a step must enter the moving average with equal weight, whichever rank computes them.
    A rank computes A of them in sequence; with momentum m / (A - (A - a) m) for the a-th (a = 1..A), each has
    weight m/A and the old value 1 - m. Each rank keeps its own moving average. The mean of these moving averages
    over ranks equals the moving average of the means, so they are averaged only when they are read.
    """

    def __init__(self, model: nn.Module, accumulation: int) -> None:
        self._norms = norms(model)
        self._momenta = [m.momentum for m in self._norms]
        self._accumulation = accumulation

    def before_micro(self, micro: int) -> None:
        """Set the momentum of micro-batch ``micro`` (0-based) of this step."""
        if self._accumulation == 1:
            return
        for layer, momentum in zip(self._norms, self._momenta, strict=True):
            if momentum is not None:
                layer.momentum = micro_momentum(momentum, micro + 1, self._accumulation)

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's statistics by layer number; references, not copies."""
        found = {}
        for i, layer in enumerate(self._norms):
            assert layer.running_mean is not None and layer.running_var is not None
            found[f"{i}.mean"], found[f"{i}.var"] = layer.running_mean, layer.running_var
        return found

    def reset(self) -> None:
        """Set them to zero: after the next step they contain momentum times that step's mean, the input of `advance`."""
        for tensor in self.tensors().values():
            tensor.zero_()

    def advance(self, step: list[torch.Tensor]) -> None:
        """Apply one step, given the values of `tensors`, in order, of a replica that called `reset` before that step."""
        own = iter(zip(self.tensors().values(), step, strict=True))
        for momentum in self._momenta:
            for tensor, contribution in (next(own), next(own)):
                tensor.mul_(1 - (momentum or 0.0)).add_(contribution)

    @contextmanager
    def averaged(self, world: World, step: int) -> Iterator[None]:
        """Within this context the model has the mean over all ranks and ``num_batches_tracked`` is ``step``."""
        own = self.tensors()
        kept = {name: tensor.clone() for name, tensor in own.items()}
        for layer in self._norms:
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(step)
        average(list(own.values()), world)
        try:
            yield
        finally:
            for name, tensor in own.items():
                tensor.copy_(kept[name])


def micro_momentum(momentum: float, a: int, accumulation: int) -> float:
    """Momentum of the a-th (1-based) of ``accumulation`` micro-batches; each gets weight momentum / accumulation."""
    return momentum / (accumulation - (accumulation - a) * momentum)


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
