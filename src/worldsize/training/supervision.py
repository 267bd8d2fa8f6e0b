"""What training aims at besides the labels: weights of the classes, and a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from worldsize import checkpoint
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.data.images import crops
from worldsize.data.samples import Dataset
from worldsize.errors import UserError
from worldsize.models import factory, networks
from worldsize.training import new_network
from worldsize.training.precision import Precision


@dataclass(frozen=True)
class Supervision:
    """``class_weights`` (classes,) and the ``teacher``, on the device; None without."""

    class_weights: torch.Tensor | None = None
    teacher: nn.Module | None = None


def teacher_checkpoint(recipe: Recipe) -> Path | None:
    """The newest checkpoint of the recipe's teacher; None without a teacher.

    Raises:
        UserError: there is no such run.
        CheckpointError: its checkpoints are damaged.
    """
    return checkpoint.find(recipe.loss.teacher.expanduser()) if recipe.loss.teacher is not None else None


def build(recipe: Recipe, dataset: Dataset, teacher_from: Path | None, number_format: Precision) -> Supervision:
    """What the recipe asks for, with the teacher of the checkpoint ``teacher_from``.

    Raises:
        UserError: weights for another number of classes, or a teacher that does not fit.
        CheckpointError: the teacher's checkpoint is damaged.
    """
    weights = _class_weights(recipe, dataset.train.labels, len(dataset.classes))
    teacher = None
    if teacher_from is not None:
        teacher = _teacher(teacher_from, recipe, dataset, number_format)
    if weights is not None:
        weights = weights.to(number_format.device, number_format.weights)
    return Supervision(weights, teacher)


def _class_weights(recipe: Recipe, labels: NDArray[np.integer[Any]], classes: int) -> torch.Tensor | None:
    if recipe.loss.balanced:
        return balanced(labels, classes)
    given = recipe.loss.class_weights
    if given and len(given) != classes:
        raise UserError(f"--loss.class-weights has {len(given)} weights, but the dataset has {classes} classes")
    return torch.tensor(given, dtype=torch.float64) if given else None


def balanced(labels: NDArray[np.integer[Any]], classes: int) -> torch.Tensor:
    """Weights inverse to the number of images of each class, 1 on average over the images: scikit-learn's ``balanced``.

    Classes without images do not count: they would lower the weights of all others, and so the learning rate.
    """
    counts = np.bincount(labels, minlength=classes)
    return torch.from_numpy(len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1)))


def _teacher(path: Path, recipe: Recipe, dataset: Dataset, number_format: Precision) -> nn.Module:
    snapshot = checkpoint.read(path)
    if snapshot.state["classes"] != list(dataset.classes):
        raise UserError(f"--loss.teacher {path} was trained on other classes than those of this dataset")
    its = recipe_files.load(str(path / "recipe.yaml"))
    if (its.data.mean, its.data.std) != (recipe.data.mean, recipe.data.std):
        raise UserError(f"--loss.teacher {path} sees images with another normalization: use its data.mean and data.std")
    network = new_network.build(its, len(dataset.classes), number_format)
    networks.load_state(network, snapshot.average or snapshot.model)
    for size in crops.crop_sizes(recipe.data, recipe.epochs):
        factory.check_input(network, size, its.micro_batch, f"the teacher {its.model.name}")
    return network.eval().requires_grad_(False)
