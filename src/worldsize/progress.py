"""Where a run is, and what it has shown so far: the part of its state that is numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from worldsize.evaluate import Result
from worldsize.track.base import Epoch, Step


@dataclass
class Progress:
    """Saved with every checkpoint.

    ``step`` counts optimiser steps of the run, ``epoch_step`` those of epoch ``epoch`` (0-based). The ``epoch_*`` sums are
    over the steps of this epoch, ``train_s`` and ``trained_steps`` over those of the run; ``evaluated_step`` is the step
    after which ``evaluation`` was made, -1 for none. In an asynchronous run, ``missing`` are steps
    that others have overtaken: handed out, and not among those that are done.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    epoch_loss: float = 0.0
    epoch_top1: float = 0.0
    epoch_s: float = 0.0
    train_s: float = 0.0
    best_top1: float = -1.0
    best_epoch: int = 0
    evaluation: dict[str, float | int] | None = None
    evaluated_step: int = -1
    missing: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Progress:
        """The inverse of `as_dict`; other keys are left alone, and what an older version did not save keeps its default."""
        return cls(**{name: state[name] for name in cls.__dataclass_fields__ if name in state})

    def add(self, steps: Sequence[Step]) -> None:
        """Count steps of this epoch that were done."""
        for step in steps:
            self.epoch_loss += step.loss
            self.epoch_top1 += step.top1
            self.epoch_s += step.step_ms / 1000
            self.train_s += step.step_ms / 1000

    def report(self, result: Result, global_batch: int, val_s: float) -> Epoch:
        """What trackers are told after an evaluation that took ``val_s`` seconds."""
        steps = max(self.epoch_step, 1)
        return Epoch(
            epoch=self.epoch + 1,
            step=self.step,
            train_loss=self.epoch_loss / steps,
            train_top1=self.epoch_top1 / steps,
            val_loss=result.loss,
            val_top1=result.top1,
            val_top5=result.top5,
            val_samples=result.samples,
            val_broken=result.broken,
            images_per_s=self.epoch_step * global_batch / max(self.epoch_s, 1e-9),
            train_s=self.epoch_s,
            val_s=val_s,
        )

    def evaluated(self, result: Result, at: Progress | None = None) -> bool:
        """Remember an evaluation, made ``at`` a former state of this run or now. Returns whether it is the best so far."""
        at = at or self
        self.evaluation, self.evaluated_step = result.as_dict(), at.step
        if result.top1 <= self.best_top1:
            return False
        self.best_top1, self.best_epoch = result.top1, at.epoch + 1
        return True

    def next_epoch(self) -> None:
        """This epoch is over."""
        self.epoch += 1
        self.epoch_step = 0
        self.epoch_loss = self.epoch_top1 = self.epoch_s = 0.0
