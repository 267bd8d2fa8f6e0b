"""The training loop. Read this file first.

A step processes one global batch. Each rank computes its ``accumulation`` micro-batches of it, the strategy synchronizes
the ranks, the optimizer updates the weights. A step depends only on the recipe, the data and the step's number; the world
size only decides which rank computes which micro-batch.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from worldsize.batch import evaluation_batch, evaluation_share
from worldsize.control import Control, Decision
from worldsize.data.feed import Feed
from worldsize.errors import Stopped
from worldsize.evaluate import Result, evaluate
from worldsize.loop import Loop
from worldsize.meter import Meter
from worldsize.step import StepRunner


@dataclass
class Trainer(Loop):
    """Synchronous training: all ranks step together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._runner = StepRunner(self.compute)
        self._control = Control(self.world)
        every_rank = self.recipe.track.every_rank
        self._meter = Meter(self.world, self.plan, self.state.strategy, self._control.watched, every_rank)
        self._collected = time.monotonic()

    def fit(self) -> Result:
        self.state.strategy.settle(lambda: self.compute.rehearse(self.train_loader.crop.size))
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
        progress = self.progress
        images = self.train_loader.training(self.plan, self.world.rank, progress.epoch, progress.epoch_step)
        batches = Feed(images, self.world.device)
        self._meter.restart()
        while progress.epoch_step < self.steps_per_epoch and progress.step < self.total_steps:
            self._after_step(self._step(batches))
        self.train_loader.broken.share(self.world)
        self.check_broken(len(self.train_loader.broken.known), self.train_loader)
        self._collect()

    def _step(self, batches: Feed) -> Decision:
        """One optimizer step: forward and backward over this rank's micro-batches, synchronization, update."""
        progress = self.progress
        lr = self.lr(progress.step)
        computed, norm = self._runner.run(batches, progress.step, lr, self._propose)
        progress.step += 1
        progress.epoch_step += 1
        self._meter.add(progress.step, progress.epoch + progress.epoch_step / self.steps_per_epoch, lr, computed, norm)
        return self._control.decide()

    def _propose(self) -> None:
        due = time.monotonic() - self._collected >= self.recipe.track.every_seconds
        self._control.propose(bool(self.stop), due, self.saver.due(), len(self.train_loader.broken.new))

    def _after_step(self, decision: Decision) -> None:
        progress = self.progress
        broken = len(self.train_loader.broken.known) + decision.new_broken
        self.check_broken(broken, self.train_loader)
        save = decision.save or self._save_due()
        stop = decision.stop or progress.step == self.stop_after
        if decision.collect or stop or save:
            self._collect(broken)
        if stop:
            self.saver.save(progress, wait=True)
            raise Stopped(f"stopped after step {progress.step:,} of {self.total_steps:,}")
        if save:
            self.saver.save(progress)

    def _save_due(self) -> bool:
        """Whether the recipe asks for a checkpoint after this step or epoch."""
        settings, progress = self.recipe.checkpoint, self.progress
        steps, epochs = settings.every_steps, settings.every_epochs
        ends_epoch = progress.epoch_step == self.steps_per_epoch
        return (steps is not None and progress.step % steps == 0) or (
            epochs is not None and ends_epoch and (progress.epoch + 1) % epochs == 0
        )

    def _collect(self, broken: int | None = None) -> None:
        """Pass the steps since the last call, over all ranks, to the trackers; raise Diverged if they are not finite."""
        self._collected = time.monotonic()
        steps = self._meter.collect(len(self.train_loader.broken.known) if broken is None else broken)
        steps = self.progress.chained(steps)
        self.progress.add(steps)
        self.trackers.steps(steps)
        self.check_finite(steps)

    def _evaluate_if_due(self) -> Result | None:
        progress = self.progress
        done = progress.step >= self.total_steps
        if not done and (progress.epoch + 1) % self.recipe.evaluate_every:
            return None
        if progress.evaluated_step == progress.step and progress.evaluation is not None:
            return Result(**progress.evaluation)  # type: ignore[arg-type]
        return self._evaluate()

    def _evaluate(self) -> Result:
        progress = self.progress
        begin = time.monotonic()
        batch = evaluation_batch(self.plan.micro_batch, self.world.device.type)
        share = len(evaluation_share(len(self.val_loader.samples), 0, self.world.size, batch))
        with self.state.consensus(self.world, progress.step):
            result = evaluate(
                self.state.model,
                self.val_loader,
                self.compute.normalise,
                self.compute.precision,
                self.world,
                batch,
                lambda: bool(self.stop),
                lambda samples: self.trackers.evaluating(samples, share),
            )
        if result is None:
            self.saver.save(progress, wait=True)
            raise Stopped(f"stopped while evaluating after step {progress.step:,} of {self.total_steps:,}")
        self.check_broken(result.broken, self.val_loader)
        if not math.isfinite(result.loss):
            self.diverged(f"the validation loss is {result.loss}", progress.step, self.peak_lr)
        self._report(result, time.monotonic() - begin)
        return result

    def _report(self, result: Result, val_s: float) -> None:
        progress = self.progress
        self.trackers.epoch(progress.report(result, self.plan.global_batch, val_s))
        if progress.evaluated(result) and self.recipe.checkpoint.best and progress.step < self.total_steps:
            self.saver.save(progress)
