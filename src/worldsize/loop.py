"""What every loop over the steps works with, whoever agrees with whom and when."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from worldsize import schedule
from worldsize.batch import BatchPlan
from worldsize.compute import Compute
from worldsize.data.loader import Loader
from worldsize.errors import DataError, Diverged
from worldsize.evaluate import Result
from worldsize.progress import Progress
from worldsize.recipe import Recipe
from worldsize.saver import Saver
from worldsize.signals import StopFlag
from worldsize.state import State
from worldsize.track import Trackers
from worldsize.track.base import Step
from worldsize.world import World


@dataclass
class Loop(ABC):
    """Everything a loop works with, made ready by `worldsize.job`.

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

    @abstractmethod
    def fit(self) -> Result | None:
        """Train to the end, evaluating on the way.

        Returns:
            The last evaluation; None on a process that does not know it.

        Raises:
            Stopped: a signal came; all is saved.
            Diverged: the loss is no longer finite.
            DataError: too many broken pictures.
        """

    def lr(self, step: int) -> float:
        """The learning rate of this step."""
        return self.peak_lr * schedule.factor(self.recipe.schedule, step, self.steps_per_epoch, self.recipe.epochs)

    def check_finite(self, steps: Sequence[Step]) -> None:
        """Stop where the loss or, without a loss scale, the gradient is not finite."""
        for step in steps:
            # With fp16 the loss scaler meets infinite gradients on its way to the right scale, and skips them.
            norm_matters = not self.state.scaler.is_enabled()
            if not math.isfinite(step.loss):
                self.diverged(f"the loss is {step.loss}", step.step, step.lr)
            elif norm_matters and not math.isfinite(step.grad_norm):
                self.diverged(f"the gradient's norm is {step.grad_norm}", step.step, step.lr)

    def diverged(self, what: str, step: int, lr: float) -> None:
        """Give up, with what may help."""
        raise Diverged(
            f"{what} at step {step:,} of {self.total_steps:,} (lr {lr:.4g}).\n"
            f"Last good checkpoint: {self.saver.newest() or 'none was saved yet'}. "
            "A lower --optimizer.lr, more --schedule.warmup-epochs, --optimizer.clip-norm or --precision fp32 may help."
        )

    def check_broken(self, broken: int, loader: Loader) -> None:
        """Stop where more of the loader's pictures are broken than the recipe allows."""
        allowed = self.recipe.data.max_broken * len(loader.samples)
        if broken > allowed:
            raise DataError(
                f"{broken} of {len(loader.samples):,} pictures cannot be decoded, more than the allowed "
                f"{self.recipe.data.max_broken:.2%}; log.txt names them. Mend them or raise --data.max-broken."
            )
