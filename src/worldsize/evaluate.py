"""Evaluation: each sample exactly once, at any world size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

from worldsize.data.loader import Loader
from worldsize.data.pixels import Normalise
from worldsize.errors import DataError
from worldsize.precision import Precision
from worldsize.world import World


@dataclass(frozen=True)
class Result:
    """Means over ``samples`` images: cross-entropy without label smoothing; accuracies as fractions, 0 to 1."""

    loss: float
    top1: float
    top5: float
    samples: int
    broken: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def evaluate(
    model: nn.Module,
    loader: Loader,
    normalise: Normalise,
    precision: Precision,
    world: World,
    batch: int,
    stopping: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda _: None,
) -> Result | None:
    """Evaluate the model on the loader's split. Sums over batches are gathered from all ranks once, at the end.

    The batches are the same at every world size, and the sum over batches is exact before it is rounded (`math.fsum`), so
    the result has the same bits at every world size.

    Args:
        batch: samples per forward pass; changes the result only by rounding.
        stopping: called before each batch; if it returns True on any rank, there is no result.
        progress: called with the number of samples that this rank has done.

    Returns:
        The same result on every rank, or None if stopped.

    Raises:
        DataError: no image could be decoded.
    """
    sums: list[torch.Tensor] = []
    was_training = model.training
    model.eval()
    done, stopped = 0, False
    try:
        with torch.inference_mode():
            for images in loader.evaluation(world.rank, world.size, batch):
                if stopped := stopping():
                    break
                labels = images.labels.to(world.device, non_blocking=True)
                with precision.autocast():
                    logits = model(normalise(images.pixels))
                sums.append(_sums(logits, labels))
                progress(done := done + len(labels))
    finally:
        model.train(was_training)
    loader.broken.share(world)
    return _reduce(sums, len(loader.broken.known), stopped, world)


def _sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(loss, top-1 correct, top-5 correct, samples) summed over one batch, float64 (4,)."""
    logits = logits.double()
    correct = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    loss = functional.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([loss, correct[:, 0].sum(), correct.sum(), loss.new_full((), len(labels))])


def _reduce(sums: list[torch.Tensor], broken: int, stopped: bool, world: World) -> Result | None:
    parts = world.gather((torch.stack(sums).tolist() if sums else [], stopped))
    if any(part[1] for part in parts):
        return None
    batches = [batch for part in parts for batch in part[0]]
    loss, top1, top5, samples = (math.fsum(batch[i] for batch in batches) for i in range(4))
    if samples == 0:
        raise DataError("none of the validation images could be decoded; see the log for their names")
    return Result(loss / samples, top1 / samples, top5 / samples, int(samples), broken)
