"""Models by name, and the BatchNorm handling that data parallelism needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import StochasticDepth

from worldsize.config.recipe import Recipe
from worldsize.distributed import device_errors
from worldsize.distributed.tree_sum import TreeSum
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import freezing, networks
from worldsize.models.freezing import FrozenBatchNorm2d
from worldsize.models.ghost_batchnorm import GhostBatchNorm2d


def build(recipe: Recipe, classes: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The recipe's model for ``classes`` classes, initialized from its seed, on ``device``.

    The weights are initialized on the CPU, so they are the same on every device and rank. The state dict uses
    names of the library that the model is from.

    Raises:
        UserError: unknown model, or a setting that it does not support.
    """
    torch.manual_seed(recipe.seed)
    model = networks.build(recipe, classes)
    layout = torch.channels_last if recipe.model.channels_last else torch.contiguous_format
    model.to(device=device, dtype=dtype)
    model.to(memory_format=layout)  # type: ignore[call-overload]
    freezing.freeze(model, recipe.model.freeze)
    return model


def check_input(
    model: nn.Module, size: int, micro_batch: int, name: str, classes: int | None = None, unfreezes: bool = False
) -> None:
    """Check that the model accepts micro-batches of ``micro_batch`` images of ``size`` x ``size`` pixels.

    Args:
        classes: also check that it returns the logits of so many classes.
        unfreezes: its frozen parts will be trained later.

    Raises:
        UserError: it does not (vision transformers support one size only; some models need larger images).
    """
    fixed = getattr(model, "image_size", size)
    if isinstance(fixed, int) and fixed != size:
        raise UserError(
            f"{name} requires images of {fixed} pixels, not {size}: "
            f"set --data.train-crop-size and --data.val-crop-size to {fixed}"
        )
    if micro_batch == 1 and norms(model, unfreezes):
        raise UserError(f"{name} uses BatchNorm, which needs more than one sample; pass --micro-batch 2 or more")
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise UserError(f"{name} has no parameters: there is nothing to train")
    was_training = model.training
    try:
        with torch.inference_mode():
            logits = model.eval()(torch.zeros(1, 3, size, size, device=parameter.device, dtype=parameter.dtype))
    except (RuntimeError, AssertionError, ValueError) as error:  # timm's networks assert
        if device_errors.is_of_device(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{name} does not support images of {size} pixels ({reason}): "
            "set --data.train-crop-size and --data.val-crop-size to a size that it does"
        ) from None
    finally:
        model.train(was_training)
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if classes is not None and shape != (1, classes):
        raise UserError(
            f"{name} returned {shape} for one image: it must return the logits of {classes} classes, (n, {classes})"
        )


def norms(model: nn.Module, frozen: bool = False) -> list[_BatchNorm]:
    """The model's BatchNorm layers that update running statistics, and with ``frozen`` also those that are frozen.

    A network's own ``train`` may leave layers in evaluation mode: these are frozen, too.
    """
    was_training = model.training
    if not was_training:
        model.train()
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    found = [layer for layer in layers if frozen or (layer.training and not isinstance(layer, FrozenBatchNorm2d))]
    if not was_training:
        model.eval()
    return found


def uses_random_draws(model: nn.Module) -> bool:
    """Whether its forward pass in training draws random numbers (dropout, stochastic depth)."""
    modules = list(model.modules())
    # Ours, timm's DropPath and PatchDropout, and networks of timm that call a function.
    names = ("drop_probability", "drop_prob", "prob", "drop_rate")
    rates = (getattr(m, name, 0.0) for m in modules for name in names)
    if any(isinstance(rate, (int, float)) and rate > 0 for rate in rates):  # a module may be called so, too
        return True
    if any(isinstance(m, (nn.RReLU, nn.FractionalMaxPool2d)) for m in modules):
        return True
    return any(m.p > 0 for m in modules if isinstance(m, (_DropoutNd, StochasticDepth))) or any(
        m.dropout > 0 for m in modules if isinstance(m, nn.MultiheadAttention)
    )


_UNUSED = -1.0  # the variance in a layer that has not run: no batch has it, and the layer multiplies it by zero
_NEARLY_ALL = 1 - 1e-6


class RunningStatistics:
    """BatchNorm's running statistics: moving averages that are updated once per step.

    All micro-batches of a step enter them with equal weight, whichever rank computes them. The layers have momentum 1, so
    a forward pass leaves the mean and the variance of its micro-batches in their buffers; `collect` keeps a sum of these,
    `advance` applies their mean. The layers contain the moving averages only inside `averaged`. Unless a strategy sums
    over all ranks, each rank has moving averages of its own micro-batches; their mean over ranks equals the moving average
    of the means, so ranks exchange them only when they are read. That is not so if the network skips layers.

    Args:
        own: a network of the user's own, whose forward passes may leave out layers. A layer's statistics are then those of
            the micro-batches that used it, and stay as they are in a step that did not use it. How many used each layer
            follows the sums as a share of all. Where each pass uses each layer, the bits are the same as without.
    """

    def __init__(self, model: nn.Module, own: bool = False) -> None:
        self.own = own
        self._momenta: dict[_BatchNorm, float] = {}  # of the layers themselves
        self._sum: TreeSum[torch.Tensor] = TreeSum(torch.Tensor.add_)
        self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        self._norms = norms(model)
        for layer in self._norms:
            self._momenta.setdefault(layer, _momentum(layer))
        self._buffers = [buffer for layer in self._norms for buffer in _statistics(layer)]
        ghosts = [layer for layer in self._norms if isinstance(layer, GhostBatchNorm2d)]
        self._groups = max((len(layer.statistics) for layer in ghosts), default=1)
        cleared = [layer for layer in self._norms if not _depends_on_its_past(layer)]
        self._cleared = [t for one in cleared for t in ([one.statistics] if one in ghosts else _statistics(one))]
        self._variances = [written(layer)[1] for layer in cleared]
        widths = [layer.num_features for layer in self._norms]
        places = [place for number, width in enumerate(widths) for place in [number] * (2 * width)]
        firsts = [2 * sum(widths[:number]) + width for number, width in enumerate(widths)]
        device = self._buffers[0].device if self._buffers else torch.device("cpu")
        self._layer_of = torch.tensor(places, dtype=torch.long, device=device)  # the layer of each value
        self._first_variance = torch.tensor(firsts, dtype=torch.long, device=device)  # each layer's
        momenta = [(b, self._momenta[layer]) for layer in self._norms for b in _statistics(layer)]
        self._momentum = _flat([torch.full_like(b, momentum) for b, momentum in momenta])
        for layer in self._norms:
            layer.momentum = 1.0
        self._averages = _flat(self._buffers)

    def extend(self, model: nn.Module, *others: torch.Tensor) -> list[torch.Tensor]:
        """Also follow the layers that update their statistics from now on, beginning with the values that they have.

        Args:
            others: other values of the layers followed so far, (n,) each.

        Returns:
            The others, extended in the same way.
        """
        followed, averages = self._buffers, self._averages
        self._watch(model)
        extended = []
        for values in (*others, averages):
            _fill(followed, values)
            extended.append(_flat(self._buffers))
        *rest, self._averages = extended
        return rest

    @torch.no_grad()
    def clear(self) -> None:
        """Before the forward passes of a step: forget what the layers have from earlier passes or an evaluation.

        With momentum 1 they multiply it by zero, which makes NaN of what is not finite.
        """
        if self._cleared:
            torch._foreach_zero_(self._cleared)
            if self.own:
                torch._foreach_add_(self._variances, _UNUSED)

    def collect(self, forward: int) -> None:
        """After the forward pass ``forward`` of this step, counted over all ranks: add its statistics to the sum."""
        found = self._of_groups()
        if self.own:
            found = self._of_used(found)
            self.clear()
        total, *others = found.unbind()
        for one in others:
            total += one
        self._sum.push(total / self._groups if others else total, forward)

    def _of_used(self, found: torch.Tensor) -> torch.Tensor:
        """What `_of_groups` found, zeros where a layer did not run, then for each layer whether it did, (groups, `size`)."""
        used = ran(found[:, self._first_variance, None]).squeeze(2)
        return torch.cat([torch.where(used[:, self._layer_of], found, 0), used.to(found.dtype)], dim=1)

    def _of_groups(self) -> torch.Tensor:
        """The statistics of each group of the last forward pass, a copy, (groups, n)."""
        parts: list[torch.Tensor] = []
        for layer in self._norms:
            if isinstance(layer, GhostBatchNorm2d):
                parts.append(layer.statistics.flatten(1))
            else:  # it normalizes the whole batch: all groups have the same statistics
                parts += [buffer.expand(self._groups, -1) for buffer in _statistics(layer)]
        return torch.cat(parts, dim=1) if parts else torch.zeros(1, 0)

    def take(self) -> list[torch.Tensor]:
        """The sums over this rank's micro-batches of the step as nodes of `distributed.tree_sum`, each (`size`,)."""
        return self._sum.take()

    def advance(self, mean: torch.Tensor) -> None:
        """Apply one step, given the mean (`size`,) of its micro-batches."""
        momentum = self._momentum
        if self.own:
            n = momentum.numel()
            mean, share = mean[:n], mean[n:][self._layer_of]
            momentum = torch.where(share > 0, momentum, 0)
            # A share of all may be 1 up to rounding; a division by 1 leaves the bits, and one by 0 has no meaning.
            mean = mean / torch.where((share > 0) & (share < _NEARLY_ALL), share, 1)
        self._averages.mul_(1 - momentum).add_(momentum * mean)

    @property
    def size(self) -> int:
        """The number of values of a step: n, and one for each layer of a network of the user's own."""
        return self._averages.numel() + (len(self._norms) if self.own else 0)

    def others(self, model: nn.Module) -> list[torch.Tensor]:
        """The model's buffers without those of the layers that it follows."""
        followed = {id(buffer) for layer in self._norms for buffer in layer.buffers(recurse=False)}
        return [buffer for buffer in model.buffers() if id(buffer) not in followed]

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's moving averages by layer number; references, not copies."""
        parts = self._averages.split([b.numel() for b in self._buffers])
        return {f"{i // 2}.{('mean', 'var')[i % 2]}": part for i, part in enumerate(parts)}

    def load_from_model(self) -> None:
        """Take the values in the layers, such as those of a checkpoint, as the moving averages."""
        self._averages.copy_(_flat(self._buffers))

    @property
    def current(self) -> torch.Tensor:
        """This rank's moving averages, (n,); a reference, not a copy."""
        return self._averages

    @contextmanager
    def averaged(self, world: World, step: int) -> Iterator[None]:
        """Within this context the model has the mean over all ranks and ``num_batches_tracked`` is ``step``."""
        for layer in self._norms:
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(step)
        self.fill(self._averages, world)
        yield  # training does not read them

    def fill(self, values: torch.Tensor, world: World) -> None:
        """Copy the mean of ``values`` (n,) over all ranks into the layers, until the next forward pass in training."""
        mean = values.clone()
        average([mean], world)
        _fill(self._buffers, mean)


def _fill(buffers: list[torch.Tensor], values: torch.Tensor) -> None:
    for buffer, part in zip(buffers, values.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(part)


def _statistics(layer: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Its running mean and variance."""
    assert layer.running_mean is not None and layer.running_var is not None
    return layer.running_mean, layer.running_var


def written(layer: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a forward pass in training leaves means and variances."""
    if isinstance(layer, GhostBatchNorm2d):
        return layer.statistics[:, 0], layer.statistics[:, 1]
    return _statistics(layer)


def _depends_on_its_past(layer: _BatchNorm) -> bool:
    """Whether a class of the user's own uses its running statistics in training, or moves them in its own way."""
    if type(layer).forward.__module__.partition(".")[0] in ("torch", "timm", "worldsize"):
        return False
    sizes = (1,) * next((n for kind, n in ((nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3)) if isinstance(layer, kind)), 0)
    noise = torch.rand(4, layer.num_features, *sizes, generator=torch.Generator().manual_seed(0))
    found = []
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            for value in (0.5, 2.0):
                one = copy.deepcopy(layer).cpu()
                for buffer in one.buffers(recurse=False):
                    buffer.fill_(value if buffer.is_floating_point() else 10**6)  # its schedule is over
                one.momentum = 1.0
                torch.default_generator.manual_seed(0)
                found.append((one(noise.to(_statistics(one)[0].dtype)), *_statistics(one)))
        return not all(torch.equal(*pair) for pair in zip(*found, strict=True))
    except Exception:  # what it needs is not known here
        return True


def ran(variances: torch.Tensor) -> torch.Tensor:
    """Whether a layer with these variances (..., channels) has run since `RunningStatistics.clear`, (..., 1)."""
    return variances[..., :1] != _UNUSED


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


class Kinds(NamedTuple):
    """A model's parameters by kind: each is in one list.

    ``weights`` are those of linear, convolution and similar layers, ``biases`` those of the same layers. ``others`` are
    the parameters of norm layers with their biases, embeddings, and vectors such as layer scales.
    """

    weights: list[nn.Parameter]
    biases: list[nn.Parameter]
    others: list[nn.Parameter]


def parameter_kinds(model: nn.Module) -> Kinds:
    """The parameters by module type; only biases, and embeddings of known networks, are recognized by their names.

    One that several modules share counts as the first's: an optimizer would update it once for each.
    """
    kinds = Kinds([], [], [])
    seen: set[nn.Parameter] = set()
    embeddings = networks.embeddings(model)
    for prefix, module in model.named_modules():
        is_other = isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.Embedding))
        is_layer = isinstance(module, (nn.Linear, _ConvNd))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            # A layer scale of shape (C, 1, 1) is a vector, a linear layer's weights of shape (1, C) are none.
            is_vector = parameter.ndim <= 1 or (not is_layer and parameter.numel() == max(parameter.shape))
            if is_other or f"{prefix}.{name}".lstrip(".") in embeddings:
                kinds.others.append(parameter)
            elif is_vector:
                (kinds.biases if name.endswith("bias") else kinds.others).append(parameter)
            else:
                kinds.weights.append(parameter)
    return kinds
