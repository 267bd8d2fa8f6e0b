"""One process's part of a step: forward and backward passes over its micro-batches."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from worldsize.batch import BatchPlan
from worldsize.data.loader import Batch
from worldsize.data.pixels import Normalise
from worldsize.data.rng import Use, seed_of
from worldsize.inspector import Inspector
from worldsize.precision import Precision
from worldsize.recipe import Recipe
from worldsize.state import TrainState


@dataclass(frozen=True)
class Computed:
    """One rank's part of a step.

    ``sums``: (loss, correct predictions) summed over the samples of each micro-batch, float64 (micro-batches, 2) on the
    device; ``samples``: the digest of each micro-batch's samples in order; ``data_s``: seconds of waiting for images.
    """

    sums: torch.Tensor
    samples: list[int]
    data_s: float


def digest(samples: NDArray[np.int64]) -> int:
    """63 bits of the SHA-256 of the samples' numbers in order."""
    return int.from_bytes(hashlib.sha256(samples.tobytes()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class Compute:
    """Computes gradients as process ``rank`` of ``plan``, with the replica in ``state``."""

    recipe: Recipe
    plan: BatchPlan
    rank: int
    device: torch.device
    state: TrainState
    precision: Precision
    normalise: Normalise
    inspector: Inspector | None = None

    def gradient(
        self,
        batches: Iterator[Batch],
        step: int,
        propose: Callable[[], None] = lambda: None,
        launched: Callable[[], None] = lambda: None,
    ) -> Computed:
        """Compute the gradient of this rank's part of the run's step ``step``, into the parameters' ``grad``.

        Args:
            propose: called once, before the last micro-batch is computed; on a GPU before the first, because launching the
                others can block.
            launched: called after each backward pass; on a GPU it is launched by then, not done.
        """
        sums, samples = [], []
        data_s = 0.0
        for micro in range(self.plan.accumulation):
            begin = time.perf_counter()
            batch = next(batches)  # of one forward pass, which may contain several micro-batches
            data_s += time.perf_counter() - begin
            last = micro == self.plan.accumulation - 1
            if micro == 0 if self.device.type == "cuda" else last:
                propose()
            forward = self.rank * self.plan.accumulation + micro
            self._seed(step, forward)
            with self.state.strategy.gradients(last):
                sums.append(self._forward_backward(batch.pixels, batch.labels, self._look(step, batch)))
            begin = time.perf_counter()
            launched()
            data_s += time.perf_counter() - begin
            self.state.statistics.collect(forward)
            samples += [digest(part) for part in batch.indices.reshape(-1, self.plan.micro_batch)]
        return Computed(torch.cat(sums), samples, data_s)

    def _seed(self, step: int, forward: int) -> None:
        """Seed the generators that the network draws from (dropout): on each device by its part of the forward pass.

        `torch.manual_seed` sets the same, and takes up to a millisecond (torch 2.12).
        """
        devices = self.plan.devices
        seeds = [seed_of(self.recipe.seed, Use.TORCH, step, forward * devices + device) for device in range(devices)]
        torch.default_generator.manual_seed(seeds[0])
        if self.device.type == "cuda":
            for index, seed in enumerate(seeds, start=self.device.index):
                torch.cuda.default_generators[index].manual_seed(seed)

    def _look(self, step: int, batch: Batch) -> Callable[[torch.Tensor], None] | None:
        """What to call with the logits of a micro-batch, if this step is inspected."""
        inspector = self.inspector
        if inspector is None or not inspector.wants(step + 1):
            return None
        return lambda logits: inspector.forward(batch, logits, self.recipe.label_smoothing)

    def _forward_backward(
        self, pixels: torch.Tensor, labels: torch.Tensor, look: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Returns the (loss, correct predictions) summed over each micro-batch, float64 (micro-batches, 2)."""
        labels = labels.to(self.device, non_blocking=True)
        with self.precision.autocast():
            logits = self.state.strategy.module(self.normalise(pixels))
            losses = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=self.recipe.label_smoothing)
        if look is not None:
            look(logits)
        self.state.scaler.scale(losses.mean() / self.state.strategy.loss_divisor).backward()
        values = torch.stack([losses.detach().double(), (logits.detach().argmax(1) == labels).double()], dim=1)
        return values.unflatten(0, (-1, min(self.plan.micro_batch, len(labels)))).sum(1)

    def unscale_and_clip(self) -> torch.Tensor:
        """Unscale the gradient and clip it. Returns its norm before clipping, a scalar on the device."""
        self.state.scaler.unscale_(self.state.optimizer)
        parameters = [p for p in self.state.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.recipe.optimizer.clip_norm is not None:
            clip_grads_with_norm_(parameters, self.recipe.optimizer.clip_norm, norm)
        return norm

    def fits(self, samples: int) -> bool:
        """Whether forward and backward of ``samples`` images fit into the memory of the GPU, beside what is there."""
        size = self.recipe.data.train_crop_size
        parameters = [p for p in self.state.model.parameters() if p.requires_grad]
        try:
            pixels = torch.zeros(samples, size, size, 3, dtype=torch.uint8)
            labels = torch.zeros(samples, dtype=torch.int64, device=self.device)
            with self.precision.autocast():
                loss = functional.cross_entropy(self.state.model(self.normalise(pixels)), labels)
            torch.autograd.grad(loss, parameters, allow_unused=True)  # without the strategy's hooks, which would send
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def rehearse(self, size: int) -> None:
        """Run forward and backward on blank images of ``size`` x ``size`` pixels, without changing any state."""
        buffers = {name: buffer.clone() for name, buffer in self.state.model.named_buffers()}
        # Norm layers need at least two images; a compiled model should see its real batch size.
        n = self.plan.forward_batch if self.recipe.model.compile else 2
        with self.state.strategy.gradients(last=True):
            self._forward_backward(torch.zeros(n, size, size, 3, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64))
        self.state.optimizer.zero_grad()
        with torch.no_grad():
            for name, buffer in self.state.model.named_buffers():
                buffer.copy_(buffers[name])
