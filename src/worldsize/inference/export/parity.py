"""Whether an exported file gives the answers of the network that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from worldsize.data.datasets.subset import Chosen
from worldsize.data.loading.loader import Batch, Loader
from worldsize.data.samples import ArraySamples, EncodedSamples, Samples
from worldsize.distributed.batch_plan import evaluation_batch
from worldsize.distributed.world import World
from worldsize.errors import DataError
from worldsize.inference.export.opened import Opened
from worldsize.inference.predict.top import probabilities
from worldsize.inference.trained import Trained
from worldsize.training.evaluation import views

LIMIT = 1e-4  # of the images may disagree
INT8_LOSS = 0.01  # of top-1 accuracy that int8 may cost
_NAMED = 10


@dataclass
class Parity:
    """What a comparison found.

    Attributes:
        images: compared; those that cannot be decoded are left out.
        disagreements: images for which the best class differs; with several labels per image, the set of classes with a
            probability above 0.5.
        by_preprocessing: those of them for which the exported network agrees on the run's own pixels.
        probability: the largest difference of a probability, 0 to 1.
        levels: the largest difference of a preprocessed value, in gray levels of 255; None if the format has no
            preprocessing of its own.
        right, right_before: images whose best class is a label, by the exported file and by the run's network.
        names: of the first images that disagree.
    """

    images: int = 0
    disagreements: int = 0
    by_preprocessing: int = 0
    probability: float = 0.0
    levels: float | None = None
    right: int = 0
    right_before: int = 0
    names: list[str] = field(default_factory=list)

    @property
    def agreement(self) -> float:
        """The fraction of the images that agree."""
        return 1 - self.disagreements / self.images

    @property
    def lost(self) -> float:
        """What the export costs in top-1 accuracy, -1 to 1."""
        return (self.right_before - self.right) / self.images

    @property
    def cause(self) -> str | None:
        """What differs, in words; None if nothing disagrees."""
        if not self.disagreements:
            return None
        network = self.disagreements - self.by_preprocessing
        both = f"the network ({network:,} images) and the preprocessing ({self.by_preprocessing:,})"
        return both if network and self.by_preprocessing else "the network" if network else "the preprocessing"

    def passed(self, int8: bool) -> bool:
        """Whether the export may be used. int8 changes answers, so its limit is the loss of accuracy."""
        return self.lost <= INT8_LOSS if int8 else self.disagreements <= LIMIT * self.images

    def as_json(self, int8: bool) -> dict[str, Any]:
        return {
            "passed": self.passed(int8),
            "images": self.images,
            "top1_agreement": self.agreement,
            "disagreements": self.disagreements,
            "differs": self.cause,
            "largest_probability_difference": self.probability,
            "largest_pixel_difference_levels": self.levels,
            "top1_run": self.right_before / self.images,
            "top1_export": self.right / self.images,
            "first_disagreements": self.names,
        }


def some(samples: Samples, count: int | None) -> Samples:
    """``count`` images of a split, evenly spaced; all without a ``count``."""
    if count is None or count >= len(samples):
        return samples
    indices = np.linspace(0, len(samples) - 1, count).round().astype(np.int64)
    if isinstance(samples, ArraySamples):
        return _Some(samples, indices)
    assert isinstance(samples, EncodedSamples)
    return Chosen(samples, indices, samples.labels[indices])


class _Some(ArraySamples):
    """The images ``indices`` of a split in memory, under their own names."""

    def __init__(self, samples: ArraySamples, indices: NDArray[np.int64]) -> None:
        labels: Any = samples.labels
        super().__init__("", samples.several(indices), labels[indices], samples.classes)
        self._samples, self._indices = samples, indices

    def name(self, index: int) -> str:
        return self._samples.name(int(self._indices[index]))


def measure(
    found: Trained, exported: Opened, loader: Loader, world: World, temperature: float, advance: Callable[[int], None]
) -> Parity:
    """Compare the exported file with the network ``found`` on the loader's images, both on the CPU in float32.

    Args:
        temperature: what the file divides its logits by.
        advance: called with the number of images of each batch.

    Raises:
        DataError: no image could be decoded.
    """
    parity = Parity()
    comparison = _Comparison(found, exported, loader.samples, temperature)
    with torch.inference_mode():
        for (batch,) in views(loader, world, evaluation_batch(found.recipe, "cpu")):
            if len(batch.indices):
                comparison.add(batch, parity)
            advance(len(batch.indices))
    if not parity.images:
        raise DataError("none of the validation images could be decoded; see the log for their names")
    return parity


class _Comparison:
    def __init__(self, found: Trained, exported: Opened, samples: Samples, temperature: float) -> None:
        self._found, self._exported, self._samples, self._temperature = found, exported, samples, temperature
        self._network: torch.nn.Module | None = None

    def add(self, batch: Batch, parity: Parity) -> None:
        expected = self._found.logits([batch.pixels]) / self._temperature
        ours = self._found.normalise(batch.pixels)
        prepared = self._prepared(batch, ours, parity)
        answers = self._answers(batch, prepared)
        multilabel = self._found.recipe.data.multilabel
        agree = _agree(expected, answers, multilabel)
        difference = (probabilities(expected, multilabel) - probabilities(answers, multilabel)).abs().nan_to_num(nan=1.0)
        parity.images += len(agree)
        parity.probability = max(parity.probability, float(difference.max()))
        parity.right += _right(answers, batch.labels)
        parity.right_before += _right(expected, batch.labels)
        if agree.all():
            return
        odd = (~agree).nonzero()[:, 0]
        parity.disagreements += len(odd)
        parity.names += [self._samples.name(int(batch.indices[i])) for i in odd][: _NAMED - len(parity.names)]
        if prepared is not None:
            again = self._alone()(ours[odd])
            parity.by_preprocessing += int(_agree(expected[odd], again, multilabel).sum())

    def _prepared(self, batch: Batch, ours: torch.Tensor, parity: Parity) -> torch.Tensor | None:
        """The images as the file's runtime prepares them; None if it leaves that to others."""
        found = [self._exported.runner.prepare(image) for image in self._images(batch)]
        if found[0] is None:
            return None
        prepared = torch.stack([one for one in found if one is not None])
        levels = float(((prepared - ours) / self._found.normalise.scale).abs().max())
        parity.levels = max(parity.levels or 0.0, round(levels, 3))
        return prepared

    def _answers(self, batch: Batch, prepared: torch.Tensor | None) -> torch.Tensor:
        if self._exported.inside:
            return torch.stack([self._exported.complete(image) for image in self._images(batch)])
        if prepared is not None:
            return self._alone()(prepared)
        return self._exported.logits([batch.pixels])

    def _images(self, batch: Batch) -> Iterator[Any]:
        return (np.asarray(self._samples.image(int(index))) for index in batch.indices)

    def _alone(self) -> torch.nn.Module:
        if self._network is None:
            self._network = self._exported.runner.network()
        return self._network


def _agree(expected: torch.Tensor, answers: torch.Tensor, multilabel: bool) -> torch.Tensor:
    """Bool (n,)."""
    same = ((expected > 0) == (answers > 0)).all(1) if multilabel else expected.argmax(1) == answers.argmax(1)
    return same & answers.isfinite().all(1)


def _right(logits: torch.Tensor, labels: torch.Tensor) -> int:
    best = logits.argmax(1)
    return int((labels.gather(1, best[:, None]).bool()[:, 0] if labels.ndim == 2 else best == labels).sum())
