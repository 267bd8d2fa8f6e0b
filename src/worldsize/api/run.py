"""A run as a program sees it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import DataError, as_path, own_errors
from worldsize.runs.run_folder import RunFolder, open_existing

if TYPE_CHECKING:
    from worldsize.inference.predict.model import Model


@dataclass(frozen=True)
class Run:
    """A run folder. Everything is read when it is asked for, so a run that still trains may be looked at.

    Raises:
        UserError: ``path`` is no run folder, or a file of the run cannot be read.
        StoreUnreachable: its disk does not answer.
    """

    path: Path

    @own_errors()
    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", open_existing(as_path(path, "run")).path)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    @own_errors()
    def recipe(self) -> Recipe:
        """Its recipe, with every setting."""
        return recipe_files.load(str(self._folder.recipe))

    @property
    @own_errors()
    def result(self) -> dict[str, Any] | None:
        """The final metrics, such as ``top1`` (0 to 1) and ``loss``; None until it has finished.

        Raises:
            DataError: result.json is damaged.
        """
        try:
            result: dict[str, Any] = json.loads(self._folder.result.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{self._folder.result} is damaged: {error}") from None
        return result

    @property
    @own_errors()
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step so far: ``step``, ``loss``, ``lr``, ``grad_norm``, ``images_per_s`` and others."""
        return [line for line in self._metrics() if line["kind"] == "step"]

    @property
    @own_errors()
    def epochs(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation so far: ``epoch``, ``val_top1``, ``val_loss`` and others."""
        return [line for line in self._metrics() if line["kind"] == "epoch"]

    def load(self, device: str = "auto") -> Model:
        """The trained network of its newest checkpoint, see `worldsize.load`."""
        from worldsize.inference.predict.model import load

        return load(self.path, device=device)

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.path)

    def _metrics(self) -> Iterator[dict[str, Any]]:
        try:
            lines = self._folder.metrics.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:  # the run is writing it
                return
