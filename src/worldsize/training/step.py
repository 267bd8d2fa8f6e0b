"""One optimizer step of one process: gradients of its micro-batches, synchronization, update."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from worldsize.data.loading.loader import Batch
from worldsize.optim import sharpness
from worldsize.optim.optimizers import set_lr
from worldsize.training.gradients import Computed, GradientComputer, StepHooks
from worldsize.training.step_recorder import StepRecorder
from worldsize.watchdog import heartbeat


@dataclass(frozen=True)
class StepRunner:
    """Runs the steps of a synchronous run. On a GPU, nothing in it makes the host wait for the device, with few exceptions.

    Torch's SyncBatchNorm reads on the host, in each layer and forward pass, which ranks had samples.
    With fp16, torch's loss scaler reads on the host whether a gradient overflowed, unless the optimizer is fused and skips
    the step itself: sgd and adamw do, all others wait once per step.
    Of a network that leaves out layers by chance, bitwise, localsgd and ddp ask which ranks have used each one.
    """

    compute: GradientComputer

    def run(self, batches: Iterator[Batch], step: int, lr: float, hooks: StepHooks) -> tuple[Computed, torch.Tensor]:
        """Compute step ``step`` (0-based) of the run.

        Args:
            batches: yields the images of each forward pass.
            hooks: what to do while the gradient is computed.

        Returns:
            This rank's part of the metrics, and the gradient's norm before clipping, a scalar on the device.
        """
        state, recorder = self.compute.state, self.compute.recorder
        set_lr(state.optimizer, lr)
        settings = self.compute.recipe.optimizer
        sharpened = sharpness.due(settings, step)
        images, again = itertools.tee(batches) if sharpened else (batches, batches)
        computed = self.compute.gradient(images, step, hooks)
        state.advance_statistics()
        hooks.changing()
        if sharpened:
            self._sharpen(again, step, settings.sam_rho)
        inspected = recorder is not None and recorder.wants(step + 1)
        heartbeat.beat(heartbeat.UPDATING)
        norm = self._inspected(recorder, step + 1) if recorder is not None and inspected else self._finish()
        if state.averaging is not None:
            state.averaging.after_step(step + 1)
        return computed, norm

    def _sharpen(self, images: Iterator[Batch], step: int, rho: float) -> None:
        """Replace the gradient by that at the point where the loss rises most. Metrics and statistics stay as they are.

        Where the gradient has overflowed, the weights at that point are NaN, and so is each buffer that the pass updates.
        """
        state = self.compute.state
        with _kept(state.statistics.others(state.model)), sharpness.ascended(state.model, rho):
            self._clear_gradient()
            self.compute.gradient(images, step, inspected=False)
        state.statistics.take()

    @cached_property
    def _finish(self) -> Callable[[], torch.Tensor]:
        """`_apply`, possibly as a CUDA graph."""
        return self.compute.graphed(self._apply)

    def _apply(self) -> torch.Tensor:
        """Apply the gradient, which is zero afterwards. Returns its norm before clipping."""
        norm = self.compute.unscale_and_clip()
        self.compute.state.strategy.update(self._optimizer_step)
        self._clear()
        return norm

    def _inspected(self, recorder: StepRecorder, step: int) -> torch.Tensor:
        """The same, and show it to the recorder."""
        state = self.compute.state
        norm = self.compute.unscale_and_clip()
        recorder.before_update(state.model)
        state.strategy.update(self._optimizer_step)
        recorder.after_update(step, state.model)
        self._clear()
        return norm

    def _clear(self) -> None:
        self.compute.state.scaler.update()
        self._clear_gradient()

    def _clear_gradient(self) -> None:
        optimizer = self.compute.state.optimizer
        # A graph adds to the same gradients in each step.
        optimizer.zero_grad(set_to_none=not self.compute.state.graphs)

    def _optimizer_step(self) -> None:
        self.compute.state.scaler.step(self.compute.state.optimizer)


@contextmanager
def _kept(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Afterwards the tensors have their old values."""
    before = [tensor.clone() for tensor in tensors]
    yield
    for tensor, values in zip(tensors, before, strict=True):
        tensor.copy_(values)
