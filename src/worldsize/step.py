"""One optimizer step of one process: gradients of its micro-batches, synchronization, update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worldsize.compute import Compute, Computed
from worldsize.data.feed import Feed
from worldsize.optim import set_lr


@dataclass(frozen=True)
class StepRunner:
    """Runs the steps of a synchronous run. On a GPU, nothing in it makes the host wait for the device."""

    compute: Compute

    def run(
        self, batches: Feed, step: int, lr: float, propose: Callable[[], None] = lambda: None
    ) -> tuple[Computed, torch.Tensor]:
        """Compute step ``step`` (0-based) of the run.

        Args:
            batches: yields the images of each forward pass.
            propose: see `Compute.gradient`.

        Returns:
            This rank's part of the metrics, and the gradient's norm before clipping, a scalar on the device.
        """
        state = self.compute.state
        set_lr(state.optimizer, lr)
        computed = self.compute.gradient(batches, step, propose, batches.prefetch)
        state.advance_statistics()
        norm = self.compute.unscale_and_clip()
        self._update(step + 1)
        state.scaler.update()
        state.optimizer.zero_grad()
        return computed, norm

    def _update(self, step: int) -> None:
        state, inspector = self.compute.state, self.compute.inspector
        if inspector is None or not inspector.wants(step):
            state.strategy.update(self._optimizer_step)
            return
        inspector.before_update(state.model)
        state.strategy.update(self._optimizer_step)
        inspector.after_update(step, state.model)

    def _optimizer_step(self) -> None:
        self.compute.state.scaler.step(self.compute.state.optimizer)
