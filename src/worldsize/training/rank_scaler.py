"""The loss scale of ranks that have different gradients."""

from __future__ import annotations

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


class RankScaler(ShardedGradScaler):
    """If the gradients of one rank overflow, all ranks skip the step. With torch's fused optimizers, too.

    torch's class tells them whether they do in a tensor of shape (1,); fused AdamW subtracts it from its steps, of shape ().
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf.reshape(()), allow_fp16)
