"""An export as a trained network, for `worldsize predict` and `worldsize.load`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.data.images.crops import Pixels, evaluation_crop, middle
from worldsize.data.images.normalize import Normalise
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.loading.loader import Loader
from worldsize.distributed.batch_plan import evaluation_share
from worldsize.distributed.world import World
from worldsize.errors import CheckpointError, UserError, first_line
from worldsize.inference.export import folder, formats
from worldsize.inference.export.base import Runner, preprocessing
from worldsize.inference.trained import Trained
from worldsize.training.precision import Precision


@dataclass(frozen=True)
class Opened(Trained):
    """An exported file in its own runtime; ``inside`` if it contains the preprocessing."""

    runner: Runner
    inside: bool

    @property
    def takes_complete(self) -> bool:
        return self.inside

    def complete(self, image: Pixels) -> torch.Tensor:
        top, left, rows, columns = middle(image.shape[0], image.shape[1], self.recipe.data.val_resize_size)
        image = np.ascontiguousarray(image[top : top + rows, left : left + columns])
        check_size(image, self.recipe)
        logits = self.runner.complete(image)
        assert logits is not None
        return logits

    def answers(self, loader: Loader, world: World, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if not self.inside:
            yield from super().answers(loader, world, batch)
            return
        # Images of any size go one by one into the file.
        for index in evaluation_share(len(loader.samples), world.rank, world.size, batch):
            try:
                logits = self.complete(np.asarray(loader.samples.image(index)))
            except BrokenImage as error:
                loader.broken.add(index, str(error))
            else:
                yield torch.tensor([index]), logits[None]


def check_size(image: Pixels, recipe: Recipe) -> None:
    """Refuse the images that our decoder refuses.

    Raises:
        BrokenImage: its aspect ratio is so extreme that the resized image would be too large.
    """
    height, width = (np.array([side]) for side in image.shape[:2])
    crop = evaluation_crop(recipe.data)
    cuts = crop.cuts(height, width, np.ones((1, crop.draws)))
    if cuts is not None and cuts[0, 2] == 0:
        raise BrokenImage(f"too large after resizing: {image.shape[1]} x {image.shape[0]} pixels")


def recipe_of(path: Path) -> Recipe:
    """The recipe of the run, with the settings that the export has.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return recipe_files.load(str(path / "recipe.yaml"))
    except UserError as error:
        raise CheckpointError(f"{error}; export again") from None


def load(path: Path, recipe: Recipe, precision: Precision) -> Opened:
    """The export in the folder ``path``, verified.

    Raises:
        CheckpointError: it is damaged, or was changed.
        UserError: a package is missing, or ``recipe`` or ``precision`` ask for something else than what was exported.
    """
    about = folder.read(path)
    if precision.name != "fp32":
        raise UserError(f"{path} computes in fp32: leave out --precision {precision.name}")
    if recipe.model != recipe_of(path).model:
        raise UserError(f"{path} has one network: leave out the --model settings")
    if recipe.data.val_ten_crop or preprocessing(recipe.data) != about["preprocessing"]:
        raise UserError(f"{path} was exported with another preprocessing: leave out the --data settings")
    classes = tuple(str(name) for name in about["classes"])
    return _opened(path, about, recipe, classes, precision)


def _opened(path: Path, about: dict[str, Any], recipe: Recipe, classes: tuple[str, ...], precision: Precision) -> Opened:
    if about["format"] not in formats.NAMES:
        raise CheckpointError(f"{path} has the unknown format {about['format']}; export again")
    form = formats.load(about["format"])
    if form.cpu and precision.device.type != "cpu":
        raise UserError(f"an export to {about['format']} runs on the CPU here: add --device cpu, or device='cpu'")
    try:
        runner = form.open(path, about, recipe, len(classes))
    except (UserError, CheckpointError):
        raise
    except Exception as error:  # runtimes raise exceptions of many types
        raise CheckpointError(f"{path} cannot be opened as {about['format']}: {first_line(error)}") from None
    return of_runner(runner, form.mirrors, recipe, classes, precision, bool(about.get("preprocess")))


def of_runner(
    runner: Runner, mirrors: bool, recipe: Recipe, classes: tuple[str, ...], precision: Precision, inside: bool
) -> Opened:
    """The exported file in ``runner`` as a trained network; ``mirrors``: it averages mirror images itself."""
    if mirrors:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"val_mirror": False})})
    network = runner.network() if not inside else torch.nn.Identity()
    normalise = Normalise(recipe.data, precision.device, precision.weights)
    return Opened(recipe, classes, network.to(precision.device), normalise, precision, runner, inside)
