"""The loop. Read this file first.

A step takes one global batch. Each rank computes its ``accumulation`` micro-batches of it, the strategy makes the ranks
agree, the optimiser moves the weights. Everything a step does is a function of the recipe, the data and the step's number;
the world size only decides which rank computes which micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from worldsize.control import Control, Decision
from worldsize.data.loader import Batch
from worldsize.errors import Stopped
from worldsize.evaluate import Result, evaluate
from worldsize.loop import Loop
from worldsize.meter import Meter
from worldsize.optim import set_lr


@dataclass
class Trainer(Loop):
    """All ranks step together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._control = Control(self.world)
        self._meter = Meter(self.world, self.plan, self.state.strategy)
        self._collected = time.monotonic()

    def fit(self) -> Result:
        self.state.strategy.settle(lambda: self.compute.rehearse(self.training.crop.size))
        while True:
            if self.progress.step < self.total_steps and self.progress.epoch_step < self.steps_per_epoch:
                self._train_epoch()
            result = self._evaluate_if_due()
            if self.progress.step >= self.total_steps:
                assert result is not None
                self.saver.save(self.progress, wait=True)
                return result
            self.progress.next_epoch()

    def _train_epoch(self) -> None:
        at = self.progress
        batches = self.training.training(self.plan, self.world.rank, at.epoch, at.epoch_step)
        self._meter.restart()
        while at.epoch_step < self.steps_per_epoch and at.step < self.total_steps:
            self._after_step(self._step(batches))
        self.training.broken.share(self.world)
        self.check_broken(len(self.training.broken.known), self.training)
        self._collect()

    def _step(self, batches: Iterator[Batch]) -> Decision:
        """One optimiser step: forward and backward over this rank's micro-batches, agreement, update."""
        at = self.progress
        lr = self.lr(at.step)
        set_lr(self.state.optimizer, lr)
        sums, data_s = self.compute.gradient(batches, at.step, self._propose)
        norm = self.compute.unscale_and_clip()
        self.state.strategy.update(self._optimizer_step)
        self.state.scaler.update()
        self.state.optimizer.zero_grad()
        at.step += 1
        at.epoch_step += 1
        values = torch.cat([sums, norm.double().view(1)])
        self._meter.add(at.step, at.epoch + at.epoch_step / self.steps_per_epoch, lr, values, data_s)
        return self._control.decide()

    def _optimizer_step(self) -> None:
        self.state.scaler.step(self.state.optimizer)

    def _propose(self) -> None:
        due = time.monotonic() - self._collected >= self.recipe.track.every_seconds
        self._control.propose(bool(self.stop), due, self.saver.due(), len(self.training.broken.new))

    def _after_step(self, decision: Decision) -> None:
        at = self.progress
        broken = len(self.training.broken.known) + decision.new_broken
        self.check_broken(broken, self.training)
        every = self.recipe.checkpoint.every_steps
        save = decision.save or (every is not None and at.step % every == 0)
        if decision.collect or decision.stop or save:
            self._collect(broken)
        if decision.stop:
            self.saver.save(at, wait=True)
            raise Stopped(f"stopped after step {at.step:,} of {self.total_steps:,}")
        if save:
            self.saver.save(at)

    def _collect(self, broken: int | None = None) -> None:
        """Hand the steps since the last time to the trackers, over all ranks; stop if they are not finite."""
        self._collected = time.monotonic()
        steps = self._meter.collect(len(self.training.broken.known) if broken is None else broken)
        self.progress.add(steps)
        self.trackers.steps(steps)
        self.check_finite(steps)

    def _evaluate_if_due(self) -> Result | None:
        at = self.progress
        done = at.step >= self.total_steps
        if not done and (at.epoch + 1) % self.recipe.evaluate_every:
            return None
        if at.evaluated_step == at.step and at.evaluation is not None:
            return Result(**at.evaluation)  # type: ignore[arg-type]
        return self._evaluate()

    def _evaluate(self) -> Result:
        at = self.progress
        begun = time.monotonic()
        share = -(-len(self.validation.samples) // self.world.size)
        with self.state.consensus(self.world, at.step):
            result = evaluate(
                self.state.model,
                self.validation,
                self.compute.normalise,
                self.compute.precision,
                self.world,
                self.plan.micro_batch,
                lambda: bool(self.stop),
                lambda samples: self.trackers.evaluating(samples, share),
            )
        if result is None:
            self.saver.save(at, wait=True)
            raise Stopped(f"stopped while evaluating after step {at.step:,} of {self.total_steps:,}")
        self.check_broken(result.broken, self.validation)
        if not math.isfinite(result.loss):
            self.diverged(f"the validation loss is {result.loss}", at.step, self.peak_lr)
        self._report(result, time.monotonic() - begun)
        return result

    def _report(self, result: Result, val_s: float) -> None:
        at = self.progress
        self.trackers.epoch(at.report(result, self.plan.global_batch, val_s))
        if at.evaluated(result) and self.recipe.checkpoint.best and at.step < self.total_steps:
            self.saver.save(at)
