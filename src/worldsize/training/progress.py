"""A run's position and results so far: the part of its state that is plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from worldsize.runs import step_hashes
from worldsize.track.base import Epoch, Step
from worldsize.training.evaluation import Result


@dataclass
class Progress:
    """Saved with every checkpoint.

    ``step`` counts optimizer steps of the run, ``epoch_step`` those of epoch ``epoch`` (0-based). The ``epoch_*`` sums are
    over the steps of this epoch, ``train_s`` over those of the run. ``evaluation`` was made after step ``evaluated_step``,
    -1 for none. In an asynchronous run, ``missing`` lists steps that were assigned but are not done yet, although later
    steps are. ``chain`` is the fingerprint of the steps so far (see `runs.step_hashes`). ``best_top1`` and ``best_map``
    are those of the best evaluation: with several labels per image, the one with the highest mAP.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    epoch_loss: float = 0.0
    epoch_top1: float = 0.0
    epoch_s: float = 0.0
    train_s: float = 0.0
    best_top1: float = -1.0
    best_map: float | None = None
    best_epoch: int = 0
    evaluation: dict[str, float | int | None] | None = None
    evaluated_step: int = -1
    missing: list[int] = field(default_factory=list)
    chain: str = step_hashes.NOT_RECORDED

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Progress:
        """The inverse of `as_dict`; ignores unknown keys, and uses defaults for keys that an older version did not save."""
        return cls(**{name: state[name] for name in cls.__dataclass_fields__ if name in state})

    def chained(self, steps: Sequence[Step]) -> list[Step]:
        """The completed steps with their fingerprints, which extend the chain."""
        linked = []
        for step in steps:
            self.chain = step_hashes.link(self.chain, vars(step))
            linked.append(replace(step, chain=self.chain))
        return linked

    def add(self, steps: Sequence[Step]) -> None:
        """Add completed steps of this epoch to the sums."""
        for step in steps:
            self.epoch_loss += step.loss
            self.epoch_top1 += step.top1
            self.epoch_s += step.step_ms / 1000
            self.train_s += step.step_ms / 1000

    def report(self, result: Result, global_batch: int, val_s: float, raw: Result | None = None) -> Epoch:
        """The tracker record of an evaluation that took ``val_s`` seconds, and of that of the ``raw`` weights, if any."""
        steps = self.epoch_step
        return Epoch(
            epoch=self._epochs,
            step=self.step,
            train_loss=self.epoch_loss / steps if steps else None,
            train_top1=self.epoch_top1 / steps if steps else None,
            val_loss=result.loss,
            val_top1=result.top1,
            val_top5=result.top5,
            val_samples=result.samples,
            val_broken=result.broken,
            images_per_s=self.epoch_step * global_batch / max(self.epoch_s, 1e-9),
            train_s=self.epoch_s,
            val_s=val_s,
            raw_loss=raw.loss if raw else None,
            raw_top1=raw.top1 if raw else None,
            raw_top5=raw.top5 if raw else None,
            val_map=result.map,
            val_f1=result.f1,
            raw_map=raw.map if raw else None,
            raw_f1=raw.f1 if raw else None,
        )

    def evaluated(self, result: Result, at: Progress | None = None) -> bool:
        """Store the evaluation of this run's state ``at`` (default: the current one). Returns whether it is the best."""
        at = at or self
        self.evaluation, self.evaluated_step = result.as_dict(), at.step
        if result.score <= (self.best_top1 if self.best_map is None else self.best_map):
            return False
        self.best_top1, self.best_map, self.best_epoch = result.top1, result.map, at._epochs
        return True

    @property
    def _epochs(self) -> int:
        """How many epochs have begun."""
        return self.epoch + (self.epoch_step > 0)

    def next_epoch(self) -> None:
        """Move to the next epoch and reset its sums."""
        self.epoch += 1
        self.epoch_step = 0
        self.epoch_loss = self.epoch_top1 = self.epoch_s = 0.0
