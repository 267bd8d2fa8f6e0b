"""What a tracker is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from worldsize.recipe import Track
from worldsize.run import RunFolder


@dataclass(frozen=True)
class Facts:
    """What is known before the first step. Sizes in samples, batch arithmetic as in `worldsize.batch`.

    ``sharing`` is the number of forward passes of a step that run at the same time: processes times devices of each, or 1
    where each process has a step of its own.
    """

    name: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    model: str
    parameters: int
    train_samples: int
    val_samples: int
    classes: int
    global_batch: int
    micro_batch: int
    accumulation: int
    sharing: int
    peak_lr: float
    lr_batch: int
    steps_per_epoch: int
    total_steps: int
    first_step: int


@dataclass(frozen=True)
class Step:
    """One optimiser step, over all ranks.

    loss is the mean of the training loss over the global batch, top1 the share of hits in it (0 to 1), grad_norm
    the L2 norm of the gradient before clipping (where ranks do not average gradients: the mean of their norms). Times are
    milliseconds, the mean over ranks; ``data_ms`` is waiting for pictures, ``communication_ms`` waiting for other ranks
    after one's own backward pass, ``compute_ms`` the rest of ``step_ms``. ``sent_bytes`` is what one rank handed to
    communication, the mean over ranks. ``rank_images_per_s`` counts each rank's samples over its own time without
    communication: it shows who holds the others up. ``details`` is what only some strategies have to say: of async the
    worker whose gradient it was, its staleness in updates, and how many workers there still are.
    """

    step: int
    epoch: float
    loss: float
    top1: float
    lr: float
    grad_norm: float
    images_per_s: float
    rank_images_per_s: list[float]
    step_ms: float
    data_ms: float
    compute_ms: float
    communication_ms: float
    sent_bytes: int
    broken: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Epoch:
    """After an evaluation. train_* are means over the steps since the last one, val_* over the validation set.

    ``details`` of async: how many gradients were applied at each staleness (0, 1, ...), how many were dropped, and each
    worker's images/s.
    """

    epoch: int
    step: int
    train_loss: float
    train_top1: float
    val_loss: float
    val_top1: float
    val_top5: float
    val_samples: int
    val_broken: int
    images_per_s: float
    train_s: float
    val_s: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """What came out. ``images_per_s`` is of training steps alone, ``seconds`` of this process's whole run."""

    top1: float
    top5: float
    loss: float
    best_top1: float
    best_epoch: int
    steps: int
    epochs: float
    images_per_s: float
    seconds: float
    checkpoint: str | None


class Tracker(ABC):
    """Gets the metrics of rank 0. ``resumed_step`` is the number of steps done before (0 for a new run)."""

    @abstractmethod
    def __init__(self, settings: Track, folder: RunFolder, resumed_step: int) -> None: ...

    def begin(self, facts: Facts) -> None:
        return

    def steps(self, steps: Sequence[Step]) -> None:
        return

    def evaluating(self, done: int, total: int) -> None:
        return

    def epoch(self, epoch: Epoch) -> None:
        return

    def end(self, summary: Summary | None) -> None:
        return


def step_scalars(step: Step) -> dict[str, float]:
    """A step as named scalars, for trackers that draw curves."""
    names = ("loss", "top1", "lr", "grad_norm")
    speed = ("images_per_s", "step_ms", "data_ms", "compute_ms", "communication_ms")
    return {f"train/{n}": getattr(step, n) for n in names} | {f"speed/{n}": getattr(step, n) for n in speed} | step.details


def epoch_scalars(epoch: Epoch) -> dict[str, float]:
    """An evaluation as named scalars."""
    return {f"val/{n}": getattr(epoch, f"val_{n}") for n in ("loss", "top1", "top5")} | {"epoch": epoch.epoch}
