"""One process's part of a step: forward and backward passes over its micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils import get_total_norm

from worldsize.config.recipe import Recipe, own_network
from worldsize.data.augmentation.mixing import WIDTH
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch
from worldsize.data.sampling.random_numbers import Use, seed_of
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.device_timer import elapsed_ms, stamp
from worldsize.models import training_pass
from worldsize.models.networks import from_file
from worldsize.optim import clipping
from worldsize.training import lost_gradients
from worldsize.training.cuda_graph import Graphed, add_gradient
from worldsize.training.margins import Answers
from worldsize.training.state import TrainState
from worldsize.training.step_recorder import StepRecorder
from worldsize.watchdog import heartbeat

if TYPE_CHECKING:
    from worldsize.distributed.device_timer import Stamp


@dataclass(frozen=True)
class Computed:
    """One rank's part of a step.

    ``sums``: (loss, correct predictions) summed over the samples of each micro-batch, float64 (micro-batches, 2) on the
    device; ``samples``: the digest of each micro-batch's samples in order; ``waits``: for images, of the device on a GPU, of
    the host on a CPU; ``answers``: about each sample; ``copies``: the parts of ``waits`` for copies to a GPU.
    """

    sums: torch.Tensor
    samples: list[int]
    waits: list[tuple[Stamp, Stamp]]
    answers: list[Answers]
    copies: list[tuple[Stamp, Stamp]] = field(default_factory=list)

    def data_s(self) -> float:
        """Seconds of waiting for images, also while they are copied; waits for the device."""
        return sum(elapsed_ms(*wait) for wait in self.waits) / 1000

    def copy_s(self) -> float:
        """Seconds of these in which they were copied."""
        return sum(elapsed_ms(*copy) for copy in self.copies) / 1000


def blank(label: torch.Tensor, n: int) -> torch.Tensor:
    """``n`` copies of a label without meaning."""
    return label.expand(n, *label.shape).contiguous()


def digest(samples: NDArray[np.int64]) -> int:
    """63 bits of the SHA-256 of the samples' numbers in order."""
    return int.from_bytes(hashlib.sha256(samples.tobytes()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class StepHooks:
    """What the trainer does while a step is computed. The first two must not wait.

    ``propose`` is called once, before the last micro-batch is computed; on a GPU before the first, because launching the
    others can block. ``launched`` is called after each backward pass; on a GPU it is launched by then, not done. It is not
    called later, after the update is launched, because it starts the copy of the next images.
    ``changing`` is called before the weights or the optimizer's state change.
    """

    propose: Callable[[], None] = lambda: None
    launched: Callable[[], None] = lambda: None
    changing: Callable[[], None] = lambda: None


NO_HOOKS = StepHooks()


@dataclass(frozen=True)
class GradientComputer:
    """Computes gradients as process ``rank`` of ``plan``, with the replica in ``state``.

    ``label`` is a label without meaning in the form of the dataset's, for rehearsals: int64 (), or uint8 (classes,).
    """

    recipe: Recipe
    plan: BatchPlan
    rank: int
    device: torch.device
    state: TrainState
    recorder: StepRecorder | None = None
    label: torch.Tensor = field(default_factory=lambda: torch.tensor(0))

    def gradient(
        self,
        batches: Iterator[Batch],
        step: int,
        hooks: StepHooks = NO_HOOKS,
        inspected: bool = True,
    ) -> Computed:
        """Compute the gradient of this rank's part of the run's step ``step``, into the parameters' ``grad``.

        Args:
            hooks: what to do meanwhile.
            inspected: if False, the recorder does not see it.
        """
        self.state.statistics.clear()
        answers, samples, waits, copies = [], [], [], []
        for micro in range(self.plan.accumulation):
            # On a GPU both stamps are in its queue, so a wait of the host does not count while the device computes.
            begin = stamp(self.device)
            heartbeat.beat(heartbeat.LOADING, micro)
            batch = next(batches)  # of one forward pass, which may contain several micro-batches
            waits.append((begin, stamp(self.device)))
            copies += [] if batch.copied is None else [batch.copied]
            last = micro == self.plan.accumulation - 1
            if micro == 0 if self.device.type == "cuda" else last:
                hooks.propose()
            forward = self.rank * self.plan.accumulation + micro
            self._seed(step, forward)
            heartbeat.beat(heartbeat.REDUCING if last and self.plan.world_size > 1 else heartbeat.COMPUTING, micro)
            with self.state.strategy.gradients(last):
                look = self._look(step, batch) if inspected else None
                if look is not None:
                    values = self._forward_backward(batch.pixels, batch.labels, batch.mix, look)
                elif batch.mix is None:
                    values = self._pass(batch.pixels, batch.labels)
                else:
                    values = self._pass(batch.pixels, batch.labels, batch.mix)
            answers.append(Answers(batch.indices, values, batch.mix is not None))
            begin = stamp(self.device)
            hooks.launched()
            waits.append((begin, stamp(self.device)))
            self.state.statistics.collect(forward)
            samples += [digest(part) for part in batch.indices.reshape(-1, self.plan.micro_batch)]
        sums = torch.cat([one.values[:, :2] for one in answers]).unflatten(0, (-1, self.plan.micro_batch)).sum(1)
        return Computed(sums, samples, waits, answers, copies)

    def _seed(self, step: int, forward: int) -> None:
        """Seed the generators that the network draws from (dropout): on each device by its part of the forward pass.

        `torch.manual_seed` sets the same, and takes up to a millisecond (torch 2.12).
        """
        devices = self.plan.devices
        seeds = [seed_of(self.recipe.seed, Use.TORCH, step, forward * devices + device) for device in range(devices)]
        torch.default_generator.manual_seed(seeds[0])
        if self._own_network:
            from_file.seed(seeds[0])
        if self.device.type == "cuda":
            for index, seed in enumerate(seeds, start=self.device.index):
                torch.cuda.default_generators[index].manual_seed(seed)

    def _look(self, step: int, batch: Batch) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """What to call with the losses and logits of a micro-batch, if this step is inspected."""
        recorder = self.recorder
        if recorder is None or not recorder.wants(step + 1):
            return None
        return lambda losses, logits: recorder.forward(batch, losses, logits, self.state.objective)

    @cached_property
    def _own_network(self) -> bool:
        return own_network.is_own(self.recipe.model.name)

    @cached_property
    def _pass(self) -> Callable[..., torch.Tensor]:
        """`_forward_backward`, possibly as a CUDA graph."""
        return self.graphed(self._forward_backward)

    def graphed(self, work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A part of a step, as a CUDA graph if the run uses them."""
        if not self.state.graphs:
            return work
        return Graphed(work, self.device, cautious=self.recipe.cuda_graphs == "auto")

    def _forward_backward(
        self,
        pixels: torch.Tensor,
        labels: torch.Tensor,
        mix: torch.Tensor | None = None,
        look: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Returns what `Objective.values` does."""
        labels = labels.to(self.device, non_blocking=True)
        losses, logits = self.state.strategy.module(pixels, labels, *(() if mix is None else (mix,)))
        if look is not None:
            look(losses, logits)
        loss = self.state.scaler.scale(losses.mean() / self.state.strategy.loss_divisor)
        if self.state.graphs:
            add_gradient(loss, [*self._trained().values()])
        else:
            loss.backward()
        return self.state.objective.values(losses.detach(), logits.detach(), labels, mix)

    def capture_again(self) -> None:
        """The network has changed: a CUDA graph of it is of no more use."""
        self.__dict__.pop("_pass", None)

    def unscale_and_clip(self) -> torch.Tensor:
        """Unscale the gradient and clip it. Returns its norm before clipping, a scalar on the device."""
        self.state.scaler.unscale_(self.state.optimizer)
        norm = get_total_norm([p.grad for p in self.state.model.parameters() if p.grad is not None])
        clipping.clip(self.state.model, self.recipe.optimizer, norm)
        return norm

    def rehearse(self, size: int) -> None:
        """Run forward and backward on noise of ``size`` x ``size`` pixels, without changing any state.

        Raises:
            LostGradients: the network is compiled, and not all of it learns.
        """
        batch = self._noise(size)
        with self._kept_buffers():
            self._seed(0, 0)
            with self.state.strategy.gradients(last=True):
                self._forward_backward(batch.pixels, batch.labels, batch.mix)
            self._require(batch, [p.grad for p in self._trained().values()])
        self.state.optimizer.zero_grad()

    def compile(self, size: int) -> None:
        """The same without the strategy, which would send: a compiled network is compiled in its first passes."""
        batch = self._noise(size)
        with self._kept_buffers():
            arguments = (batch.pixels, batch.labels.to(self.device), *(() if batch.mix is None else (batch.mix,)))
            self._seed(0, 0)
            losses, _ = self.state.strategy.module(*arguments)
            self._require(batch, torch.autograd.grad(losses.sum(), [*self._trained().values()], allow_unused=True))

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.state.model.named_parameters() if p.requires_grad}

    def _require(self, batch: Batch, gradients: Sequence[torch.Tensor | None]) -> None:
        """Of a compiled network, after a pass that began with the seed of step 0."""
        if not self.state.compiled:
            return
        named = dict(zip(self._trained(), gradients, strict=True))
        draws = training_pass.draws(self.state.model, self.recipe)
        labels = batch.labels.to(self.device)
        self._seed(0, 0)
        lost_gradients.require(self.state.objective, named, batch.pixels, labels, batch.mix, draws)

    def _noise(self, size: int) -> Batch:
        """Images of noise, where those of training are: a compiler asks where its inputs are."""
        # A compiler, and cuDNN's choice of algorithms, should see the real batch; without them, two images are enough for
        # norm layers.
        n = self.plan.forward_batch if self.state.compiled or self.device.type == "cuda" else 2
        pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, size, size, 3), np.uint8))
        mix = torch.ones(n, WIDTH) if self.recipe.augment.mixes else None
        batch = Batch(pixels, blank(self.label, n), np.arange(n), mix)
        return next(Feed(iter([batch]), self.device, self.recipe.data.device_prefetch))

    @contextmanager
    def _kept_buffers(self) -> Iterator[None]:
        """The network's buffers are the same afterwards."""
        buffers = {name: buffer.clone() for name, buffer in self.state.model.named_buffers()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in self.state.model.named_buffers():
                    buffer.copy_(buffers[name])
