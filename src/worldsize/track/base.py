"""The tracker interface and the data that trackers receive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from worldsize.config.recipe import Track
from worldsize.runs.run_folder import RunFolder


@dataclass(frozen=True)
class RunFacts:
    """Known before the first step. Sizes are in samples, batch arithmetic as in `worldsize.distributed.batch_plan`.

    ``sharing`` is the number of forward passes of a step that run in parallel: processes times devices per process, or 1
    if each process computes its own steps. ``evaluates_first``: before its next step, the run evaluates the state after
    ``first_step``, if the recipe asks for that.
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
    multilabel: bool = False
    validates_on: str = ""
    evaluates_first: bool = False


@dataclass(frozen=True)
class Step:
    """One optimizer step, over all ranks.

    ``loss`` is the mean training loss over the global batch, ``top1`` the fraction of correct predictions in it (0 to 1),
    ``grad_norm`` the L2 norm of the gradient before clipping (if ranks do not average gradients: the mean of their norms).
    Times are milliseconds, the mean over ranks: ``data_ms`` is spent waiting for images, ``copy_ms`` waiting until they are
    copied to a GPU (0 on CPUs, which copy nothing), ``communication_ms`` waiting for
    other ranks after this rank's backward pass, ``overhead_ms`` in the loop between two steps (metrics, checkpoints; 0 on
    GPUs, where it overlaps), ``compute_ms`` is the rest of ``step_ms``. ``straggler_ms`` is the part of
    ``communication_ms`` spent waiting for slower ranks, not for the transfer. ``sent_bytes`` is the number of
    bytes that one rank sends, the mean over ranks. ``rank_images_per_s`` is each rank's samples divided by its time without
    communication: it shows which rank slows down the others. With many ranks it is empty, unless `recipe.Track.every_rank`
    is set; ``rank_quantiles`` then has the minimum, the quartiles and the maximum of these speeds, and ``slowest_ranks`` the
    slowest ranks with theirs. ``samples`` is a digest of the samples in order and ``chain``
    the run's fingerprint after this step (see `worldsize.runs.step_hashes`); empty: not recorded. ``details`` has values of
    specific strategies; for async: the worker that computed the gradient, its staleness in updates, and the number of
    active workers. Other times are then those of this worker, but ``step_ms`` is the time since the last update, without
    that in which rank 0 evaluates or saves and nobody computes, and ``images_per_s`` the speed over the last five updates
    per process. ``gpu_watts`` is the mean power of all GPUs together since the last steps were collected, ``gpu_busy``
    the share of that time in which a GPU computed (0 to 1, the mean), ``gpu_memory_gb`` the most memory that tensors had on
    one GPU, 10^9 bytes; None: unknown, or on CPUs. ``nonfinite_ranks`` are those with a loss of their own that is NaN or
    infinite; empty if all ranks have one.
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
    samples: str = ""
    chain: str = ""
    rank_quantiles: list[float] = field(default_factory=list)
    slowest_ranks: dict[int, float] = field(default_factory=dict)
    straggler_ms: float = 0.0
    overhead_ms: float = 0.0
    copy_ms: float = 0.0
    gpu_watts: float | None = None
    gpu_busy: float | None = None
    gpu_memory_gb: float | None = None
    nonfinite_ranks: list[int] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


GPU = ("gpu_watts", "gpu_busy", "gpu_memory_gb")  # fields of `Step` that only GPUs have


@dataclass(frozen=True)
class Window:
    """Where the time of some successive steps went.

    ``step`` is the last of them and ``steps`` their number. ``between_s`` has seconds between the steps of two epochs
    since the last window, on rank 0: ``evaluation``, ``checkpoint``, ``metrics``, ``compiling`` and ``other``. The rest
    is about ``ranks``, all of them or with many ranks the slowest: ``ms`` has one list for each of
    `worldsize.attribution.step_time.PARTS` and `attribution.step_time.USAGE`, with a mean per step for each of these
    ranks. ``mean_ms`` is the mean over all ranks.
    """

    step: int
    steps: int
    between_s: dict[str, float]
    ranks: list[int]
    ms: dict[str, list[float]]
    mean_ms: dict[str, float]


@dataclass(frozen=True)
class Epoch:
    """An evaluation. train_* are means over the steps since the last one, None without any; val_* over the validation set.

    With averaged weights, val_* are theirs and raw_* those of the weights themselves; otherwise raw_* are None. *_map and
    *_f1 are None unless images have several labels, see `worldsize.training.evaluation.Result`.
    ``details`` for async: the number of gradients applied at each staleness (0, 1, ...), the number of dropped gradients,
    and each worker's images/s.
    """

    epoch: int
    step: int
    train_loss: float | None
    train_top1: float | None
    val_loss: float
    val_top1: float
    val_top5: float
    val_samples: int
    val_broken: int
    images_per_s: float
    train_s: float
    val_s: float
    raw_loss: float | None = None
    raw_top1: float | None = None
    raw_top5: float | None = None
    val_map: float | None = None
    val_f1: float | None = None
    raw_map: float | None = None
    raw_f1: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Final metrics. ``images_per_s`` covers training steps only, ``seconds`` the total run time of this process.

    ``chain`` is the run's fingerprint after the last step, as in `Step`. ``map``, ``f1`` and ``best_map`` are None unless
    images have several labels; the best epoch is then the one with the highest mAP.
    """

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
    chain: str = ""
    map: float | None = None
    f1: float | None = None
    best_map: float | None = None


class Tracker(ABC):
    """Receives the metrics on rank 0. ``resumed_step`` is the number of steps done before this start (0 for a new run)."""

    @abstractmethod
    def __init__(self, settings: Track, folder: RunFolder, resumed_step: int) -> None: ...

    def begin(self, facts: RunFacts) -> None:
        return

    def steps(self, steps: Sequence[Step]) -> None:
        return

    def window(self, window: Window) -> None:
        return

    def evaluating(self, done: int, total: int) -> None:
        return

    def epoch(self, epoch: Epoch) -> None:
        return

    def end(self, summary: Summary | None) -> None:
        return


def step_scalars(step: Step) -> dict[str, float]:
    """A step as named scalars, for trackers that plot curves."""
    names = ("loss", "top1", "lr", "grad_norm")
    speed = (
        "images_per_s",
        "step_ms",
        "data_ms",
        "copy_ms",
        "compute_ms",
        "communication_ms",
        "straggler_ms",
        "overhead_ms",
    )
    gpu = [name for name in GPU if getattr(step, name) is not None]
    scalars = {f"train/{n}": getattr(step, n) for n in names} | {f"speed/{n}": getattr(step, n) for n in (*speed, *gpu)}
    return scalars | step.details


def epoch_scalars(epoch: Epoch) -> dict[str, float]:
    """An evaluation as named scalars."""
    names = ("loss", "top1", "top5", "map", "f1")
    values = {f"{kind}/{n}": getattr(epoch, f"{kind}_{n}") for kind in ("val", "raw") for n in names}
    return {name: value for name, value in values.items() if value is not None} | {"epoch": epoch.epoch}
