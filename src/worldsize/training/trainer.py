"""The training loop. Read this file first.

A step processes one global batch. It depends only on the recipe, the data and the step's number; the world size only
decides which rank computes which micro-batch. In order, `Trainer._step`:

1. takes the learning rate of the step (`base_trainer`), and this rank's next images from `data.loading.device_feed`;
2. computes the gradients of this rank's micro-batches (`gradients`); in the last one, the strategy sends (`parallel`);
3. meanwhile proposes to the other ranks to stop, to save or to collect metrics (`rank_decisions`);
4. advances BatchNorm's running statistics, once for all micro-batches (`models.factory.RunningStatistics`);
5. unscales and clips the gradient, lets the strategy and the optimizer update the weights, and averages them (`step`);
6. keeps the metrics on the device (`step_metrics`), and reads what the ranks decided.

`Trainer._after_step` does what they decided: metrics to the trackers, checkpoints (`saver`), the end of the run.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial

from worldsize.data.images.crops import crop_size, five_crops
from worldsize.data.loading.device_feed import Feed
from worldsize.distributed import device_errors
from worldsize.distributed.batch_plan import evaluation_batch, evaluation_share
from worldsize.errors import Stopped
from worldsize.training import out_of_memory, unfreezing
from worldsize.training.base_trainer import BaseTrainer
from worldsize.training.compilation import Compiler
from worldsize.training.evaluation import Result, evaluate
from worldsize.training.gradients import StepHooks
from worldsize.training.rank_decisions import Decision, RankDecisions
from worldsize.training.replicas import Replicas
from worldsize.training.step import StepRunner
from worldsize.training.step_metrics import StepMetrics
from worldsize.watchdog import heartbeat


@dataclass
class Trainer(BaseTrainer):
    """Synchronous training: all ranks step together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._runner = StepRunner(self.compute)
        self._control = RankDecisions(self.world)
        self._replicas = Replicas(self.world, self.state.model, not self.state.strategy.local_gradients)
        every_rank = self.recipe.track.every_rank
        strategy, work = self.state.strategy, self.train_loader.work
        # A CPU has computed a step when the loop ends it.
        deferred = self.recipe.track.deferred and self.world.device.type == "cuda"
        self._meter = StepMetrics(self.world, self.plan, strategy, work, every_rank, deferred)
        self._collected = time.monotonic()
        self._sizes: set[int] = set()  # of images that were rehearsed
        self._compiler = Compiler(self.recipe, self.world.is_main)

    def fit(self) -> Result:
        try:
            data, epoch = self.recipe.data, self.progress.epoch
            if self.progress.step < self.total_steps:
                self._rehearse(crop_size(data, epoch) if self.state.compiled else data.train_crop_size, first=True)
            self.saver.prepare()
            result = self._train()
            self.trackers.window(self._meter.rest(self.progress.step))
            return result
        finally:
            self._meter.close()

    def _train(self) -> Result:
        while True:
            if self.progress.step < self.total_steps and self.progress.epoch_step < self.steps_per_epoch:
                self._train_epoch()
            result = self._evaluate_if_due()
            if self.progress.step >= self.total_steps:
                assert result is not None
                self._save(wait=True)
                return result
            self.progress.next_epoch()

    def _rehearse(self, size: int, first: bool = False) -> None:
        """Prepare the first step and, if the network is compiled, images of another size. Steps do not include it."""
        compiled, strategy = self.state.compiled, self.state.strategy

        def passes() -> None:
            if compiled and not strategy.rehearses:
                self.compute.compile(size)
            if first or strategy.rehearses:
                strategy.prepare_first_step(lambda: self.compute.rehearse(size))

        heartbeat.beat(heartbeat.COMPILING if compiled else heartbeat.STARTING)
        with self._meter.spending("compiling" if compiled else "other"):
            if compiled:
                self._compiler.first_passes(passes, size)
            else:
                passes()
        self._sizes.add(size)

    def _train_epoch(self) -> None:
        progress = self.progress
        size = crop_size(self.recipe.data, progress.epoch)
        unfreezes = unfreezing.due(self.recipe.model, progress)
        if unfreezes:
            unfreezing.unfreeze(self.compute)
            self._runner = StepRunner(self.compute)
            self._sizes.clear()
        if unfreezes or (self.state.compiled and size not in self._sizes):
            self._rehearse(size, first=unfreezes)
        images = self.train_loader.training(self.plan, self.world.rank, progress.epoch, progress.epoch_step)
        batches = Feed(images, self.world.device, self.recipe.data.device_prefetch)
        self._meter.restart()
        while progress.epoch_step < self.steps_per_epoch and progress.step < self.total_steps:
            self._after_step(self._step(batches))
        self._share_broken()
        self.train_loader.samples.share(self.world)
        self._collect()
        self._merge_margins()

    def _share_broken(self) -> None:
        """Exchange the broken images that ranks found; raise DataError if together they are too many."""
        heartbeat.beat(heartbeat.COLLECTING)
        self.train_loader.broken.share(self.world)
        self.check_broken(len(self.train_loader.broken.known), self.train_loader)

    def _merge_margins(self) -> None:
        """Here and in checkpoints, so that no rank keeps more than those of an epoch."""
        if self.state.margins is not None:
            heartbeat.beat(heartbeat.COLLECTING)
            with self._meter.spending("metrics"):
                self.state.margins.merge(self.world)

    def _step(self, batches: Feed) -> Decision:
        """One optimizer step: forward and backward over this rank's micro-batches, synchronization, update."""
        progress = self.progress
        heartbeat.begin_step(progress.step)
        lr = self.lr(progress.step)
        self._meter.begin()
        hooks = StepHooks(self._propose, batches.prefetch, self.saver.settle)
        computed, norm = self._runner.run(batches, progress.step, lr, hooks)
        progress.step += 1
        progress.epoch_step += 1
        if self.state.margins is not None:
            self.state.margins.add(computed.answers)
        self._meter.add(progress.step, progress.epoch + progress.epoch_step / self.steps_per_epoch, lr, computed, norm)
        heartbeat.beat(heartbeat.AGREEING)
        decision = self._control.decide()
        heartbeat.end_step()
        return decision

    def _propose(self) -> None:
        due = time.monotonic() - self._collected >= self.recipe.track.every_seconds
        self._control.propose(bool(self.stop) or self.saver.lost, due, self.saver.due(), len(self.train_loader.broken.new))

    def _after_step(self, decision: Decision) -> None:
        progress = self.progress
        if decision.new_broken:
            self._share_broken()
        save = decision.save or self._save_due()
        stop = decision.stop or progress.step == self.stop_after
        if decision.collect or stop or save:
            self._collect(rest=stop or save)
        if stop:
            self._save(wait=True)
            raise Stopped(f"stopped after step {progress.step:,} of {self.total_steps:,}")
        if save:
            self._save()

    def _save(self, wait: bool = False) -> None:
        heartbeat.beat(heartbeat.SAVING)
        explained = device_errors.explained(self.world.rank, lambda: out_of_memory.of_snapshot(self.plan))
        with explained, self._meter.spending("checkpoint"):
            self._replicas.compare(self.progress.step)
            self.saver.save(self.progress, wait)

    def _save_due(self) -> bool:
        """Whether the recipe asks for a checkpoint after this step or epoch."""
        every = self.recipe.checkpoint.every_steps
        return (every is not None and self.progress.step % every == 0) or self.epoch_save_due()

    def _collect(self, rest: bool = True) -> None:
        """Pass the steps since the last call, over all ranks, to the trackers; raise Diverged if they are not finite.

        Args:
            rest: all of them, see `StepMetrics.collect`: so that nothing is saved or evaluated that is not finite.
        """
        self._collected = time.monotonic()
        heartbeat.beat(heartbeat.COLLECTING)
        with self._meter.spending("metrics"):
            steps, windows = self._meter.collect(len(self.train_loader.broken.known), rest)
            steps = self.progress.chained(steps)
            self.progress.add(steps)
            self.trackers.steps(steps)
            for window in windows:
                self.trackers.window(window)
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
        batch = evaluation_batch(self.recipe, self.world.device.type)
        share = len(evaluation_share(len(self.val_loader.samples), 0, self.world.size, batch))

        def evaluated() -> Result | None:
            return evaluate(
                self.state.model,
                self.val_loader,
                self.state.objective.normalise,
                self.state.objective.precision,
                self.world,
                batch,
                lambda: bool(self.stop),
                lambda samples: self.trackers.evaluating(samples, share),
                self.recipe.data.val_mirror,
                five_crops(self.recipe.data),
                ahead=self.recipe.data.device_prefetch,
            )

        raw: Result | None = None
        remedy = partial(out_of_memory.of_evaluation, batch, self.recipe, self.plan)
        explained = device_errors.explained(self.world.rank, remedy)
        consensus = self.state.consensus(self.world, progress.step)
        with explained, self._meter.spending("evaluation"), consensus:
            result = evaluated()
            if result is not None and self.state.averaging is not None:
                with self.state.averaged(self.world):
                    raw, result = result, evaluated()
        if result is None:
            self._save(wait=True)
            raise Stopped(f"stopped while evaluating after step {progress.step:,} of {self.total_steps:,}")
        self.check_broken(result.broken, self.val_loader)
        if not math.isfinite(result.loss):
            self.diverged(f"the validation loss is {result.loss}", progress.step, self.peak_lr)
        self._report(result, raw, time.monotonic() - begin)
        return result

    def _report(self, result: Result, raw: Result | None, val_s: float) -> None:
        progress = self.progress
        self.trackers.epoch(progress.report(result, self.plan.global_batch, val_s, raw))
        if progress.evaluated(result) and self.recipe.checkpoint.best and progress.step < self.total_steps:
            self._save()
