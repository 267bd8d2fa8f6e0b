"""AdamW with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worldsize.optim.moments import AdamMoments


class NAdamW(AdamMoments):
    """AdamW whose update looks one step ahead (Dozat 2016, "Incorporating Nesterov momentum into Adam").

    As in timm and in MLCommons' algorithmic-efficiency, momentum has no schedule of its own. ``torch.optim.NAdam`` gives it
    one.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights, gradients in self.by_steps(group):
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                updates = self.updates(weights, gradients, group, nesterov=True)
                torch._foreach_sub_(weights, torch._foreach_mul(updates, group["lr"]))
