"""``worldsize labels``: find training images whose labels are probably wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from worldsize import checkpoint
from worldsize.config import command_line, output_files, recipe_files
from worldsize.config.wording import quoted
from worldsize.distributed.rank import cores
from worldsize.distributed.stop_signals import ends_at_once, temporary_folder
from worldsize.errors import SUCCESS, DataError, UserError

if TYPE_CHECKING:
    from worldsize.checkpoint import Tensors
    from worldsize.config.recipe import Recipe
    from worldsize.data.samples import Dataset
    from worldsize.inference.labels.suspects import Suspect


@dataclass
class Labels:
    """Rank the training images by how probable it is that their label is wrong.

    Training has recorded the margin of each image in each epoch: the logit of its label minus the largest other logit. The
    mean is low where the label contradicts the rest of the data (area under the margin, Pleiss et al. 2020). The file has
    the most suspicious images with a proposed class. Look at them with --sheet, correct the column `label`, and train with
    `--data.labels FILE`, or pack with `data pack --relabel FILE`. The run and the dataset are not changed.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run, whose newest checkpoint is used, or a checkpoint."""
    top: int = 200
    """Number of images."""
    out: Path = Path("labels.csv")
    """The file with the images and their labels, which must not exist."""
    sheet: Path | None = None
    """Also write a page with the images, where you choose the correct labels and download the file."""
    duplicates: bool = False
    """Also read all images of the dataset, and list copies of one image with different labels."""
    data_root: Path | None = None
    """The dataset, if it is not where the run found it."""


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    asked = command_line.parse(Labels, argv, None, "labels")
    if asked.top < 1:
        raise UserError(f"--top {asked.top}: must be at least 1")
    if asked.out.exists():
        raise UserError(f"--out {asked.out} exists, perhaps with labels that you corrected: pass another file")
    output_files.check_each({"--out": asked.out, "--sheet": asked.sheet})
    with ends_at_once("the run and the dataset were not changed"), temporary_folder() as cache:
        return _work(asked, cache)


def _work(asked: Labels, cache: Path) -> int:
    from worldsize.data import open_dataset
    from worldsize.inference.labels import ranking, suspects, write
    from worldsize.inference.predict import model

    path = checkpoint.find(asked.run)
    snapshot, recipe = checkpoint.read(path), recipe_files.load(str(path / "recipe.yaml"))
    if asked.data_root is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"root": asked.data_root})})
    sums = _sums(path, snapshot.samples, recipe)
    used = open_dataset(recipe.data, cache)
    given = used
    if recipe.data.labels is not None:
        given = open_dataset(recipe.data.model_copy(update={"labels": None}), cache)
    _check_unchanged(path, snapshot.state["data"], used)
    copies = _copies(used) if asked.duplicates else {}
    ranked = ranking.ranked(sums)
    found = suspects.find(ranked, asked.top, given, used, model.load(path), copies)
    write.table(asked.out, found)
    if asked.sheet is not None:
        write.sheet(asked.sheet, f"{checkpoint.run_of(path).name}: suspicious labels", found, used)
    _report(asked, found, len(ranked.indices), len(used.train))
    return SUCCESS


def _sums(path: Path, samples: Tensors, recipe: Recipe) -> Tensors:
    """The sums of training.

    Raises:
        UserError: there are none; the message says why.
    """
    if recipe.data.multilabel:
        raise UserError("labels are ranked if each image has one; this run has several per image")
    if not samples:
        raise UserError(
            f"{path} has no margins: the run was trained by an older version, with --track.no-margins or with strategy "
            "async. Train again, for a few epochs"
        )
    if not samples["visits"].any():
        mixed = "; this recipe mixes images. Train with --augment.mixup 0 --augment.cutmix 0" if recipe.augment.mixes else ""
        raise UserError(f"{path} has the margin of no image{mixed}")
    return samples


def _check_unchanged(path: Path, fingerprint: dict[str, object], dataset: Dataset) -> None:
    if fingerprint["train"] != dataset.train.fingerprint:
        raise DataError(f"{path} was trained on other images or labels than those of this dataset: pass --data-root")


def _copies(dataset: Dataset) -> dict[int, tuple[str, ...]]:
    """By training image, the names of the images with the same bytes and another label."""
    from worldsize.data.survey import verify

    found = verify.verify(dataset, cores())
    copies: dict[int, tuple[str, ...]] = {}
    for group in verify.duplicates(found):
        members = [(found[split].samples, split, index) for split, index in group]
        for samples, split, index in members:
            others = [
                f"{part}/{other.key(i)} ({other.label_names(i)[0]})"
                for other, part, i in members
                if other.label_names(i) != samples.label_names(index)
            ]
            if others and split == "train":
                copies[index] = tuple(others)
    return copies


def _report(asked: Labels, found: list[Suspect], ranked: int, images: int) -> None:
    from worldsize.inference.labels import write

    write.show(found)
    changed = sum(one.label != one.given for one in found)
    print(f"{len(found):,} of {images:,} training images; the label of {changed:,} would change. Labels: {asked.out}")
    if ranked < images:  # an epoch leaves out what does not fill a batch, and images that cannot be decoded
        print(f"{ranked:,} of the {images:,} were ranked; training has not visited the others")
    if asked.sheet is not None:
        print(f"Look at them and choose the correct labels: {asked.sheet}")
    print(f"Train with these labels: worldsize train RECIPE --data.labels {quoted(asked.out)}")
