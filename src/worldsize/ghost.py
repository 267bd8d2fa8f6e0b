"""Ghost BatchNorm: several micro-batches in one forward pass, each normalized with its own statistics.

Hoffer et al. 2017, "Train longer, generalize better" (arXiv 1705.08741), section 4. A GPU needs a large batch per forward
pass; the micro-batch, which decides the numbers, may stay small.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Equals BatchNorm2d with momentum 1 applied to each ``group`` consecutive samples separately, up to rounding.

    During training the running statistics become the mean over the groups. The number of samples is a multiple of
    ``group``, or less than it. ``num_batches_tracked`` is not counted here; `RunningStatistics` sets it.
    """

    group: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        groups = max(1, len(input) // self.group)
        return self._fused(input, groups) if torch.compiler.is_compiling() else self._separately(input, groups)

    def _separately(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """With torch's own kernels, one group after the other."""
        # One tensor each: the backward pass checks that they were not written to since.
        means, variances = ([torch.zeros_like(self.weight) for _ in range(groups)] for _ in range(2))
        parts = [
            functional.batch_norm(part, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
            for part, mean, variance in zip(x.chunk(groups), means, variances, strict=True)
        ]
        self._keep(torch.stack(means), torch.stack(variances))
        return parts[0] if groups == 1 else torch.cat(parts)

    def _fused(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """As plain arithmetic, which a compiler turns into few kernels."""
        grouped = x.to(self.weight.dtype).unflatten(0, (groups, -1))
        variance, mean = torch.var_mean(grouped, dim=(1, 3, 4), correction=0, keepdim=True)
        scale = torch.rsqrt(variance + self.eps) * self.weight[:, None, None]
        y = (grouped - mean) * scale + self.bias[:, None, None]
        n = grouped[0, :, 0].numel()
        self._keep(mean.detach().view(groups, -1), variance.detach().view(groups, -1) * (n / (n - 1)))
        return y.flatten(0, 1).to(x.dtype)

    def _keep(self, means: torch.Tensor, variances: torch.Tensor) -> None:
        """Store the statistics of the groups, each (groups, channels)."""
        assert self.running_mean is not None and self.running_var is not None
        with torch.no_grad():
            self.running_mean.copy_(means.mean(0))
            self.running_var.copy_(variances.mean(0))


def split_norms(model: nn.Module, group: int) -> None:
    """Let the model's BatchNorm layers normalize each ``group`` samples separately; names and tensors stay the same."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats:
            module.__class__ = GhostBatchNorm2d
            cast(GhostBatchNorm2d, module).group = group
