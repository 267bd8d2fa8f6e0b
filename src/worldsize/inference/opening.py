"""What a user names as a trained network: a run, a checkpoint or an export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from worldsize import checkpoint
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.inference import trained
from worldsize.inference.export import folder
from worldsize.inference.trained import Trained
from worldsize.training.precision import Precision


@dataclass(frozen=True)
class Source:
    """Where a network is.

    Attributes:
        path: the checkpoint, or the folder of the export.
        title: its name for people.
        recipe: of the run.
        cache: folder for cached listings of files.
        load: (recipe, precision, raw) to the network; see `trained.load`.
    """

    path: Path
    title: str
    recipe: Recipe
    cache: Path
    load: Callable[[Recipe, Precision, bool], Trained]


def find(target: Path) -> Source:
    """What ``target`` names, without loading it.

    Raises:
        UserError: it is none of the three.
        CheckpointError: it is damaged, or the run has no checkpoint.
    """
    if folder.is_export(target):
        return _export(target)
    path = checkpoint.find(target)

    def load(recipe: Recipe, precision: Precision, raw: bool) -> Trained:
        return trained.load(path, checkpoint.read(path), recipe, precision, raw)

    run = checkpoint.run_of(path)
    cache = run.parent / ".cache"  # listings are cached next to the run
    return Source(path, run.name, recipe_files.load(str(path / "recipe.yaml")), cache, load)


def _export(path: Path) -> Source:
    from worldsize.inference.export import opened

    def load(recipe: Recipe, precision: Precision, raw: bool) -> Trained:
        if raw:
            raise UserError(f"--raw: the export {path} has only one set of weights; export the run with --raw")
        return opened.load(path, recipe, precision)

    return Source(path, path.absolute().name, opened.recipe_of(path), path.absolute().parent / ".cache", load)
