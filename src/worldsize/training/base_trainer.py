"""The base of the training loops: what synchronous and asynchronous training share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from worldsize.config.recipe import Recipe
from worldsize.data.broken_images import refuse_many
from worldsize.data.loading.loader import Loader
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.stop_signals import StopFlag
from worldsize.distributed.world import World
from worldsize.errors import Diverged
from worldsize.optim import schedules
from worldsize.track import Trackers
from worldsize.track.base import Step
from worldsize.training.evaluation import Result
from worldsize.training.gradients import GradientComputer
from worldsize.training.progress import Progress
from worldsize.training.saver import Saver
from worldsize.training.state import TrainState


@dataclass
class BaseTrainer(ABC):
    """Everything a training loop needs, built by `worldsize.training.build`.

    ``lr_batch`` is the number of samples that the learning rate is scaled to. ``stop_after`` is a step after which to save
    and stop, as after a signal.
    """

    recipe: Recipe
    plan: BatchPlan
    world: World
    state: TrainState
    compute: GradientComputer
    lr_batch: int
    train_loader: Loader
    val_loader: Loader
    trackers: Trackers
    saver: Saver
    stop: StopFlag
    stop_after: int | None = None
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.steps_per_epoch = self.plan.steps_per_epoch(len(self.train_loader.samples))
        self.total_steps = self.plan.total_steps(self.recipe, len(self.train_loader.samples))
        self.peak_lr = schedules.peak_lr(self.recipe.optimizer, self.lr_batch)

    @abstractmethod
    def fit(self) -> Result | None:
        """Train to the end, with evaluations in between.

        Returns:
            The last evaluation; None on a process that does not have it.

        Raises:
            Stopped: stopped by a signal; everything is saved.
            Diverged: the loss is NaN or infinite.
            DataError: too many broken images.
        """

    @property
    def evaluates_first(self) -> bool:
        """Whether a run that continues from here evaluates before its next step, if the recipe asks for that."""
        at = self.progress
        ended = at.epoch_step == self.steps_per_epoch or at.step >= self.total_steps
        return ended and at.evaluated_step != at.step

    def lr(self, step: int) -> float:
        """The learning rate of step ``step``."""
        return self.peak_lr * schedules.factor(self.recipe.schedule, step, self.steps_per_epoch, self.recipe.epochs)

    def epoch_save_due(self) -> bool:
        """Whether an epoch ends here after which the recipe asks for a checkpoint."""
        every, progress = self.recipe.checkpoint.every_epochs, self.progress
        ends = progress.epoch_step == self.steps_per_epoch
        return every is not None and ends and (progress.epoch + 1) % every == 0

    def check_finite(self, steps: Sequence[Step]) -> None:
        """Raise Diverged if the loss or, without loss scaling, the gradient is not finite."""
        for step in steps:
            # With fp16, infinite gradients are expected while the loss scaler adjusts; it skips those steps.
            norm_matters = not self.state.scaler.is_enabled()
            if not math.isfinite(step.loss):
                ranks = ", ".join(map(str, step.nonfinite_ranks))
                where = f" on rank {ranks}, and finite on the others" if ranks else ""
                self.diverged(f"the loss is {step.loss}{where},", step.step, step.lr)
            elif norm_matters and not math.isfinite(step.grad_norm):
                self.diverged(f"the gradient's norm is {step.grad_norm}", step.step, step.lr)

    def diverged(self, what: str, step: int, lr: float) -> None:
        """Raise Diverged, with the last checkpoint and possible remedies."""
        raise Diverged(
            f"{what} at step {step:,} of {self.total_steps:,} (lr {lr:.4g}).\n"
            f"Last good checkpoint: {self.saver.newest(finite=True) or 'none'}. "
            "Try a lower --optimizer.lr, more --schedule.warmup-epochs, --optimizer.clip-norm or --precision fp32."
        )

    def check_broken(self, broken: int, loader: Loader) -> None:
        """Raise DataError if more of the loader's images are broken than the recipe allows."""
        refuse_many(broken, len(loader.samples), self.recipe.data.max_broken, "log.txt")
