"""The loop. Read this file first.

A step takes one global batch. Each rank computes its ``accumulation`` micro-batches of it, the strategy makes the ranks
agree, the optimiser moves the weights. Everything a step does is a function of the recipe, the data and the step's number;
the world size only decides which rank computes which micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from worldsize import schedule
from worldsize.batch import BatchPlan
from worldsize.compute import Compute
from worldsize.control import Control, Decision
from worldsize.data.loader import Batch, Loader
from worldsize.errors import DataError, Diverged, Stopped
from worldsize.evaluate import Result, evaluate
from worldsize.meter import Meter
from worldsize.optim import set_lr
from worldsize.progress import Progress
from worldsize.recipe import Recipe
from worldsize.saver import Saver
from worldsize.signals import StopFlag
from worldsize.state import State
from worldsize.track import Trackers
from worldsize.track.base import Step
from worldsize.world import World


@dataclass
class Trainer:
    """Everything the loop works with, made ready by `worldsize.job`.

    ``lr_batch`` is the number of samples that the learning rate is scaled to.
    """

    recipe: Recipe
    plan: BatchPlan
    world: World
    state: State
    compute: Compute
    lr_batch: int
    training: Loader
    validation: Loader
    trackers: Trackers
    saver: Saver
    stop: StopFlag
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.steps_per_epoch = self.plan.steps_per_epoch(len(self.training.samples))
        self.total_steps = self.plan.total_steps(self.recipe, len(self.training.samples))
        self.peak_lr = schedule.peak_lr(self.recipe.optimizer, self.lr_batch)
        self._control = Control(self.world)
        self._meter = Meter(self.world, self.plan, self.state.strategy)
        self._collected = time.monotonic()

    def fit(self) -> Result:
        """Train to the end, evaluating on the way.

        Returns:
            The last evaluation.

        Raises:
            Stopped: a signal came; all is saved.
            Diverged: the loss is no longer finite.
            DataError: too many broken pictures.
        """
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
        self._check_broken(len(self.training.broken.known), self.training)
        self._collect()

    def _step(self, batches: Iterator[Batch]) -> Decision:
        """One optimiser step: forward and backward over this rank's micro-batches, agreement, update."""
        at = self.progress
        lr = self.peak_lr * schedule.factor(self.recipe.schedule, at.step, self.steps_per_epoch, self.recipe.epochs)
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
        self._check_broken(broken, self.training)
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
        self._check_finite(steps)

    def _check_finite(self, steps: list[Step]) -> None:
        for step in steps:
            # With fp16 the loss scaler meets infinite gradients on its way to the right scale, and skips them.
            norm_matters = not self.state.scaler.is_enabled()
            if not math.isfinite(step.loss):
                self._diverged(f"the loss is {step.loss}", step.step, step.lr)
            elif norm_matters and not math.isfinite(step.grad_norm):
                self._diverged(f"the gradient's norm is {step.grad_norm}", step.step, step.lr)

    def _diverged(self, what: str, step: int, lr: float) -> None:
        raise Diverged(
            f"{what} at step {step:,} of {self.total_steps:,} (lr {lr:.4g}).\n"
            f"Last good checkpoint: {self.saver.newest() or 'none was saved yet'}. "
            "A lower --optimizer.lr, more --schedule.warmup-epochs, --optimizer.clip-norm or --precision fp32 may help."
        )

    def _check_broken(self, broken: int, loader: Loader) -> None:
        allowed = self.recipe.data.max_broken * len(loader.samples)
        if broken > allowed:
            raise DataError(
                f"{broken} of {len(loader.samples):,} pictures cannot be decoded, more than the allowed "
                f"{self.recipe.data.max_broken:.2%}; log.txt names them. Mend them or raise --data.max-broken."
            )

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
        self._check_broken(result.broken, self.validation)
        if not math.isfinite(result.loss):
            self._diverged(f"the validation loss is {result.loss}", at.step, self.peak_lr)
        self._report(result, time.monotonic() - begun)
        return result

    def _report(self, result: Result, val_s: float) -> None:
        at = self.progress
        self.trackers.epoch(at.report(result, self.plan.global_batch, val_s))
        if at.evaluated(result) and self.recipe.checkpoint.best and at.step < self.total_steps:
            self.saver.save(at)
