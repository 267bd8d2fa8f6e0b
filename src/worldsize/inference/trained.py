"""A trained network of a checkpoint, with the evaluation preprocessing of its run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from worldsize import checkpoint
from worldsize.checkpoint import Snapshot
from worldsize.config.recipe import Recipe
from worldsize.data.confusable_names import look_alikes
from worldsize.data.images.crops import Crop, evaluation_crop, five_crops
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.loader import Loader
from worldsize.distributed.world import World
from worldsize.errors import CheckpointError, UserError
from worldsize.models import networks
from worldsize.training import new_network, resume
from worldsize.training.evaluation import mean_logits, views
from worldsize.training.precision import Precision


@dataclass(frozen=True)
class Trained:
    """``network`` is in evaluation mode, with the averaged weights if there are any; ``classes`` in label order."""

    recipe: Recipe
    classes: tuple[str, ...]
    network: nn.Module
    normalise: Normalise
    precision: Precision

    @property
    def crops(self) -> tuple[Crop, ...]:
        """The views of an image whose logits are averaged."""
        return five_crops(self.recipe.data) or (evaluation_crop(self.recipe.data),)

    def logits(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Mean logits (n, classes), on the device, of n images cut by each of `crops`: uint8 (n, size, size, 3) each."""
        mirror = self.recipe.data.val_mirror or len(pixels) > 1
        return mean_logits(self.network, pixels, self.normalise, self.precision, mirror)

    def answers(self, loader: Loader, world: World, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Numbers int64 (n,) and mean logits (n, classes) of this rank's part of the loader's images, in batches."""
        for seen in views(loader, world, batch, five_crops(self.recipe.data)):
            yield torch.from_numpy(seen[0].indices), self.logits([view.pixels for view in seen])

    @property
    def takes_complete(self) -> bool:
        """Whether it takes decoded images of any size (`complete`), not crops (`logits`): some exports do."""
        return False

    def complete(self, image: NDArray[np.uint8]) -> torch.Tensor:
        """The logits (classes,) of a decoded image, uint8 (height, width, 3).

        Raises:
            BrokenImage: it is too large after resizing.
        """
        raise NotImplementedError


def load(path: Path, snapshot: Snapshot, recipe: Recipe, precision: Precision, raw: bool = False) -> Trained:
    """The network of ``snapshot``, which was read from the checkpoint ``path``.

    Args:
        raw: take the weights themselves, even if their average was saved.

    Raises:
        CheckpointError: it is a checkpoint of another network than the recipe's.
    """
    classes = tuple(snapshot.state["classes"])
    network = new_network.build(recipe, len(classes), precision)
    try:
        networks.load_state(network, snapshot.model if raw else snapshot.average or snapshot.model)
    except RuntimeError:
        raise CheckpointError(f"{path} does not fit {recipe.model.name}") from None
    normalise = Normalise(recipe.data, precision.device, precision.weights, recipe.model.channels_last)
    return Trained(recipe, classes, network.eval(), normalise, precision)


def check_classes(path: Path, classes: Sequence[str], given: Sequence[str]) -> None:
    """Refuse images of other classes, or of the same in another order, than the checkpoint ``path`` was trained on.

    Raises:
        UserError: names what differs, as for a run that is resumed.
    """
    if (changes := resume.class_changes(list(classes), list(given))) is not None:
        alike = look_alikes(classes, given)
        raise UserError(f"{path} was trained on other classes than those of this dataset: {changes}{alike}")


def identity(path: Path, raw: bool) -> dict[str, str]:
    """Which weights `load` takes of the checkpoint ``path``: its run and its name, their file and its SHA-256."""
    name = "model.safetensors" if raw or not (path / checkpoint.AVERAGE).is_file() else checkpoint.AVERAGE
    digest = checkpoint.digest(path, name)
    return {"run": checkpoint.run_of(path).name, "checkpoint": path.absolute().name, "weights": name, "sha256": digest}
