"""Ghost BatchNorm: several micro-batches in one forward pass, each normalized with its own statistics.

Hoffer et al. 2017, "Train longer, generalize better" (arXiv 1705.08741), section 4. A GPU needs a large batch per forward
pass; the micro-batch, which decides the numbers, may stay small.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from worldsize.distributed.batch_plan import BatchPlan
from worldsize.models.freezing import FrozenBatchNorm2d


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Equals BatchNorm2d with momentum 1 applied to each ``group`` consecutive samples separately, up to rounding.

    During training, ``statistics`` (groups, 2, channels) becomes the mean and the variance of each group. The number of
    samples is a multiple of ``group``, or less than it. One buffer, because each one is an input of a compiled network.
    The running statistics are those of evaluation: `RunningStatistics` sets them, and ``num_batches_tracked``.
    """

    group: int
    statistics: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        groups = max(1, len(input) // self.group)
        if not torch.compiler.is_compiling():
            return self._separately(input, groups)
        return self._fused(input, groups)

    def _separately(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """With torch's own kernels, one group after the other."""
        rows = self.statistics.flatten(0, 1).unbind()
        parts = [
            functional.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
            for part, mean, variance in zip(x.chunk(groups), rows[::2], rows[1::2], strict=False)
        ]
        return parts[0] if groups == 1 else torch.cat(parts)

    def _fused(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """As plain arithmetic, which a compiler turns into few kernels."""
        y, mean, variance = _Normalization.apply(x, self.weight, self.bias, groups, self.eps)
        n = x.numel() // (groups * self.num_features)
        with torch.no_grad():
            self.statistics[:groups] = torch.stack([mean, variance * (n / (n - 1))], dim=1)
        return y


def _normalized(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize ``x`` (n, C, H, W). Also returns the means and the biased variances, (groups, C).

    Every tensor has one name, so that it is one value to a compiler: torch 2.11's makes each intermediate value an output,
    and where a conversion to the same type returned an output once more, it gave the real one no gradient.
    """
    values = x if x.dtype == weight.dtype else x.to(weight.dtype)
    variance, mean = torch.var_mean(_grouped(values, groups), dim=_WITHIN, correction=0)
    scale = torch.rsqrt(variance + eps)
    y = (values - _per_sample(mean, x)) * _per_sample(scale * weight, x) + bias[:, None, None]
    return y if y.dtype == x.dtype else y.to(x.dtype), mean, variance


class _Normalization(torch.autograd.Function):
    """`_normalized` with its gradient written out.

    Autograd's own gradient of a variance reads the images once more, to compute their mean again. This one is the formula
    of Ioffe and Szegedy 2015 (arXiv 1502.03167, section 3), with two sums over the images.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _normalized(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        x, weight, _, ctx.groups, ctx.eps = inputs
        _, mean, variance = output
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        dy = gradients[0].to(weight.dtype)
        deviation = x.to(weight.dtype) - _per_sample(mean, x)
        scale = torch.rsqrt(variance + ctx.eps)
        n = x.numel() // mean.numel()
        total, along = _sums(dy, ctx.groups), _sums(dy * deviation, ctx.groups)
        dx = dy - deviation * _per_sample(along * scale * scale / n, x) - _per_sample(total / n, x)
        dx = (dx * _per_sample(scale * weight, x)).to(x.dtype)
        return dx, (along * scale).sum(0), total.sum(0), None, None


_WITHIN = (1, 3, 4)  # the dimensions of (groups, samples, C, H, W) over which a group's statistics go


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(n, C, H, W) as (groups, samples, C, H, W)."""
    return x.unflatten(0, (groups, -1))


def _sums(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The sum of each group and channel, (groups, C).

    Not of a view of ``x``: where several kernels read ``x``, torch's compiler would store it in the order that the view has,
    channel by channel, while the images have their channels last. Kernels that read both orders are slow.
    """
    if groups == 1:
        return x.sum((0, 2, 3))[None]
    return x.sum((2, 3)).unflatten(0, (groups, -1)).sum(1)


def _per_sample(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A value for each group and channel, (groups, C), as one for each sample of ``x`` and channel, (n, C, 1, 1)."""
    groups, channels = values.shape
    return values[:, None].expand(groups, len(x) // groups, channels).reshape(len(x), channels, 1, 1)


def splits(model: nn.Module) -> bool:
    """Whether `split_norms` knows all BatchNorm layers."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    known = (nn.BatchNorm2d, FrozenBatchNorm2d)
    return all(type(layer) in known and layer.affine and layer.track_running_stats for layer in layers)


def wanted(plan: BatchPlan, device: torch.device) -> bool:
    """Whether to call `split_norms`: on a GPU always, because its layers launch fewer kernels."""
    return plan.groups > 1 or device.type == "cuda"


def split_norms(model: nn.Module, group: int, groups: int) -> None:
    """Let the BatchNorm layers normalize each ``group`` samples separately, in batches of up to ``groups`` groups.

    Names and tensors of the state dict stay the same.
    """
    for module in model.modules():
        if type(module) is not nn.BatchNorm2d or not module.affine or not module.track_running_stats:
            continue
        module.__class__ = GhostBatchNorm2d
        layer = cast(GhostBatchNorm2d, module)
        layer.group = group
        assert module.running_mean is not None
        statistics = module.running_mean.new_zeros(groups, 2, module.num_features)
        module.register_buffer("statistics", statistics, persistent=False)
