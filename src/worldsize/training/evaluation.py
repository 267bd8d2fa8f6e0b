"""Evaluation: each sample exactly once, at any world size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from worldsize.config.wording import count
from worldsize.data.images.crops import Crop
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch, Loader
from worldsize.distributed.world import World
from worldsize.errors import DataError
from worldsize.training.average_precision import mean_average_precision, micro_f1
from worldsize.training.precision import Precision
from worldsize.watchdog import heartbeat


@dataclass(frozen=True)
class Result:
    """Means over ``samples`` images: cross-entropy without label smoothing; accuracies as fractions, 0 to 1.

    If images have several labels, ``loss`` is the binary cross-entropy, mean over the classes; ``top1`` and ``top5`` count
    the images for which one of the 1 or 5 highest scores is that of a label; ``map`` is the mean average precision over the
    classes that have an image, and ``f1`` the micro-averaged F1 score of the predictions with a probability above 0.5, both
    0 to 1. Otherwise these two are None.
    """

    loss: float
    top1: float
    top5: float
    samples: int
    broken: int
    map: float | None = None
    f1: float | None = None

    @property
    def score(self) -> float:
        """What makes a checkpoint the best: ``map`` if images have several labels, otherwise ``top1``."""
        return self.top1 if self.map is None else self.map

    def as_dict(self) -> dict[str, float | int | None]:
        return asdict(self)

    def __str__(self) -> str:
        several = "" if self.map is None or self.f1 is None else f"mAP {self.map:.2%}, F1 {self.f1:.2%}, "
        return f"{several}top-1 {self.top1:.2%}, top-5 {self.top5:.2%}, loss {self.loss:.4f} on {count(self.samples)}"


@dataclass(frozen=True)
class _Tally:
    """What one rank has evaluated, on its device.

    Of each batch: ``sums`` float64 (4,), see `_sums`; and (n, classes) ``logits`` and ``labels``, if images have several
    labels.
    """

    sums: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    labels: list[torch.Tensor] = field(default_factory=list)

    def add(self, logits: torch.Tensor, labels: torch.Tensor, scores: bool) -> None:
        self.sums.append(_sums(logits, labels))
        if scores and labels.ndim == 2:
            self.logits.append(logits)
            self.labels.append(labels)

    def scores(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Logits float64 (n, classes) and labels bool (n, classes) of all batches; None without several labels."""
        if not self.logits:
            return None
        return torch.cat(self.logits).double().cpu().numpy(), torch.cat(self.labels).bool().cpu().numpy()


def evaluate(
    model: nn.Module,
    loader: Loader,
    normalise: Normalise,
    precision: Precision,
    world: World,
    batch: int,
    stopping: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda _: None,
    mirror: bool = False,
    crops: Sequence[Crop] = (),
    scores: bool = True,
    each: Callable[[Batch, torch.Tensor], None] | None = None,
    ahead: bool = True,
) -> Result | None:
    """Evaluate the model on the loader's split. Sums over batches are gathered from all ranks once, at the end.

    The batches are the same at every world size, and the sum over batches is exact before it is rounded (`math.fsum`), so
    the result has the same bits at every world size. If images have several labels, all logits are gathered too.

    Args:
        batch: samples per forward pass; changes the result only by rounding.
        stopping: called before each batch; if it returns True on any rank, there is no result.
        progress: called with the number of samples that this rank has done.
        mirror: average the logits of each image and of its mirror image.
        crops: average the logits of these crops of each image and of their mirror images.
        each: called with each batch of this rank, on its device, and its logits (n, classes).
        ahead: see `Feed`.
        scores: compute ``map`` and ``f1`` if images have several labels, which gathers the logits of all images.

    Returns:
        The same result on every rank, or None if stopped.

    Raises:
        DataError: no image could be decoded, or none that has a label.
    """
    tally = _Tally()
    was_training = model.training
    model.eval()
    done, stopped = 0, False
    heartbeat.beat(heartbeat.EVALUATING)
    try:
        # Not in inference mode, where autocast keeps no casts (torch 2.12).
        with torch.no_grad(), precision.weights_cast_once():
            feeds = [Feed(batches, world.device, ahead) for batches in _each_crop(loader, world, batch, crops)]
            for seen in zip(*feeds, strict=True):
                if stopped := stopping():
                    break
                labels = seen[0].labels.to(world.device, non_blocking=True)
                pixels = [view.pixels for view in seen]
                logits = mean_logits(model, pixels, normalise, precision, mirror or bool(crops))
                tally.add(logits, labels, scores)
                if each is not None:
                    each(seen[0], logits)
                progress(done := done + len(labels))
                heartbeat.beat(heartbeat.EVALUATING, done)
                for feed in feeds:
                    feed.prefetch()
    finally:
        model.train(was_training)
    heartbeat.beat(heartbeat.COLLECTING, done)
    loader.broken.share(world)
    return _reduce(tally, len(loader.broken.known), stopped, world)


def views(loader: Loader, world: World, batch: int, crops: Sequence[Crop] = ()) -> Iterator[tuple[Batch, ...]]:
    """Batches of this rank's part of the split: the images as each of the ``crops`` cuts them, or the loader's crop."""
    return zip(*_each_crop(loader, world, batch, crops), strict=True)


def _each_crop(loader: Loader, world: World, batch: int, crops: Sequence[Crop]) -> list[Iterator[Batch]]:
    """The batches of `views`, by crop."""
    return [loader.evaluation(world.rank, world.size, batch, crop) for crop in crops or (None,)]


def mean_logits(
    model: nn.Module, pixels: Sequence[torch.Tensor], normalise: Normalise, precision: Precision, mirror: bool
) -> torch.Tensor:
    """The mean logits (n, classes) over views of n images, uint8 (n, size, size, 3) each, and over their mirror images."""
    with precision.autocast():
        return torch.stack([view_logits(model, normalise(view), mirror) for view in pixels]).mean(0)


def view_logits(model: nn.Module, pixels: torch.Tensor, mirror: bool) -> torch.Tensor:
    """The logits (n, classes) of normalized images (n, 3, size, size), or the mean with those of their mirror images."""
    logits: torch.Tensor = (model(pixels) + model(pixels.flip(3))) / 2 if mirror else model(pixels)
    return logits


def highest(logits: torch.Tensor, most: int) -> torch.Tensor:
    """The classes with the ``most`` highest logits, the highest first: int64 (n, most), or (n, classes) if there are fewer.

    Of equal logits, that of the class with the smaller number counts as higher, as in argmax. topk takes any of them, and
    in bf16 about one image in a hundred has two that are highest.
    """
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :most]


def _sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(loss, top-1 correct, top-5 correct, samples) summed over one batch, float64 (4,)."""
    logits = logits.double()
    top = highest(logits, 5)
    if labels.ndim == 2:
        correct = labels.gather(1, top).bool()
        loss = functional.binary_cross_entropy_with_logits(logits, labels.double(), reduction="none").mean(1).sum()
    else:
        correct = top == labels[:, None]
        loss = functional.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([loss, correct[:, 0].sum(), correct.any(1).sum(), loss.new_full((), len(labels))])


def _reduce(tally: _Tally, broken: int, stopped: bool, world: World) -> Result | None:
    parts = world.gather((torch.stack(tally.sums).tolist() if tally.sums else [], stopped))
    if any(part[1] for part in parts):
        return None
    batches = [batch for part in parts for batch in part[0]]
    loss, top1, top5, samples = (math.fsum(batch[i] for batch in batches) for i in range(4))
    if samples == 0:
        raise DataError("none of the validation images could be decoded; see the log for their names")
    several = _of_several_labels(tally, world)
    return Result(loss / samples, top1 / samples, top5 / samples, int(samples), broken, *several)


def _of_several_labels(tally: _Tally, world: World) -> tuple[float | None, float | None]:
    """``map`` and ``f1`` of all ranks; None without several labels."""
    parts = [part for part in world.gather(tally.scores()) if part is not None]
    if not parts:
        return None, None
    logits, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    precision = mean_average_precision(logits, labels)
    if precision is None:
        raise DataError("none of the validation images that have labels could be decoded; see the log for their names")
    return precision, micro_f1(logits > 0, labels)
