"""The interface of a format. To add one: a module ``to_NAME`` with a class ``Form``, and NAME in `formats.FormatName`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worldsize.config.recipe import Data, Recipe
from worldsize.data.images.crops import Pixels
from worldsize.inference.trained import Trained


@dataclass(frozen=True)
class Options:
    """What was asked for, as in `command.Export`. ``temperature`` is 1 if none was."""

    preprocess: bool = False
    fold: bool = False
    int8: bool = False
    aoti: bool = False
    temperature: float = 1.0
    opset: int = 20
    layout: str | None = None
    calibration: int = 256


@dataclass(frozen=True)
class Source:
    """What is exported: a network in evaluation mode on the CPU, float32, and where it is from.

    Attributes:
        run: name of the run.
        checkpoint: name of the checkpoint.
        data: the fingerprint of the training data, see `Dataset.fingerprint`.
        calibration: normalized training images, float32 (n, 3, size, size), for int8; computed when it is called.
    """

    found: Trained
    run: str
    checkpoint: str
    data: dict[str, Any]
    calibration: Callable[[int], torch.Tensor]

    @property
    def recipe(self) -> Recipe:
        return self.found.recipe


class Runner(ABC):
    """An exported file in its own runtime."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Normalized float32 (n, 3, size, size) to logits float32 (n, classes)."""

    def prepare(self, image: Pixels) -> torch.Tensor | None:
        """The runtime's own preprocessing, normalized float32 (3, size, size); None if it has none."""
        return None

    def complete(self, image: Pixels) -> torch.Tensor | None:
        """The logits (classes,) of a decoded image, if the file contains the preprocessing; otherwise None."""
        return None


class Format(ABC):
    """A kind of exported file.

    Attributes:
        options: the names of the `Options` that it supports.
        cpu: whether its runtime computes on the CPU.
        mirrors: whether the file itself averages mirror images (`val_mirror`).
    """

    options: Sequence[str] = ()
    cpu = False
    mirrors = False

    @abstractmethod
    def check(self, recipe: Recipe, options: Options) -> None:
        """Refuse, before any work, what the format cannot express or what is not installed.

        Raises:
            UserError: the message names formats that can, or what to install.
        """

    @abstractmethod
    def write(self, folder: Path, source: Source, options: Options) -> list[str]:
        """Write the files into ``folder``. Returns lines of the model card that show how to use them."""

    @abstractmethod
    def open(self, folder: Path, about: dict[str, Any], recipe: Recipe, classes: int) -> Runner:
        """The export in ``folder``, whose hashes were checked; ``about`` is export.json."""


def preprocessing(data: Data) -> dict[str, Any]:
    """The numbers of the evaluation preprocessing."""
    return {
        "resize": data.val_resize_size,
        "size": data.val_crop_size,
        "interpolation": data.interpolation,
        "mean": list(data.mean),
        "std": list(data.std),
        "mirror": data.val_mirror,
    }
