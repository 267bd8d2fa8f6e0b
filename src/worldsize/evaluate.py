"""Evaluation: every sample exactly once, at any world size."""

from __future__ import annotations

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
    """Means over ``samples`` pictures: cross-entropy without smoothing; accuracies as fractions, 0 to 1."""

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
    """The model's result on the loader's split; sums over samples, reduced once.

    Args:
        batch: samples per forward pass; has no influence on the result beyond rounding.
        stopping: asked before each batch; where any rank answers True, there is no result.
        progress: told how many samples this rank has done.

    Returns:
        The same on every rank, or None when it was stopped.

    Raises:
        DataError: not one picture could be decoded.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    was_training = model.training
    model.eval()
    done, stopped = 0, False
    try:
        with torch.inference_mode():
            for pictures in loader.evaluation(world.rank, world.size, batch):
                if stopped := stopping():
                    break
                labels = pictures.labels.to(world.device, non_blocking=True)
                with precision.autocast():
                    logits = model(normalise(pictures.pixels))
                sums += _sums(logits, labels)
                progress(done := done + len(labels))
    finally:
        model.train(was_training)
    loader.broken.share(world)
    return _reduce(sums, len(loader.broken.known), stopped, world)


def _sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(loss, top-1 hits, top-5 hits, samples) of one batch, float64."""
    logits = logits.double()
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    loss = functional.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([loss, best[:, 0].sum(), best.sum(), torch.tensor(len(labels), device=loss.device)])


def _reduce(sums: torch.Tensor, broken: int, stopped: bool, world: World) -> Result | None:
    parts = world.gather((sums.tolist(), stopped))
    if any(part[1] for part in parts):
        return None
    loss, top1, top5, samples = (sum(column) for column in zip(*(part[0] for part in parts), strict=True))
    if samples == 0:
        raise DataError("not one of the validation pictures could be decoded; the log names them")
    return Result(loss / samples, top1 / samples, top5 / samples, int(samples), broken)
