"""ImageNet (ILSVRC 2012), in the layout of torchvision or of Kaggle.

Kaggle's "ImageNet Object Localization Challenge" unpacks to ``ILSVRC/Data/CLS-LOC/train/WNID/*.JPEG``, a flat
``ILSVRC/Data/CLS-LOC/val/*.JPEG``, and ``LOC_val_solution.csv`` (``ImageId,PredictionString`` where the
prediction begins with the image's WNID) next to ``ILSVRC``.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

from worldsize.config.recipe import Data
from worldsize.data import shards
from worldsize.data.datasets import file_index, folder
from worldsize.data.samples import Dataset
from worldsize.data.unused_files import hidden
from worldsize.errors import UserError

_SOLUTION = "LOC_val_solution.csv"


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """Open ImageNet in ``settings.root``: the folder with ``train`` and ``val``, ``ILSVRC`` or its parent, or shards.

    Raises:
        UserError: the folder has none of these layouts, or the validation images have no labels.
    """
    root = folder.required_root(settings)
    if shards.is_packed(root):
        return shards.open_dataset(root)
    for kaggle in (root, root / "ILSVRC"):
        images = kaggle / "Data" / "CLS-LOC"
        if images.is_dir():
            return _kaggle(kaggle, images, cache)
    validation = folder.validation_folder(root)
    if (root / "train").is_dir() and validation is not None:
        if validation.name != "test" and _is_flat(validation):  # images to predict have no labels
            return _flat_val(root / "train", validation, _solution(root, root.absolute().parent), cache)
        return folder.two_splits(root / "train", validation, cache)
    raise UserError(
        f"{root} does not contain ImageNet: expected {root}/train and {root}/val, "
        f"or Kaggle's {root}/Data/CLS-LOC or {root}/ILSVRC/Data/CLS-LOC"
    )


def _kaggle(base: Path, images: Path, cache: Path) -> Dataset:
    train, val = images / "train", images / "val"
    if not val.is_dir():
        raise UserError(f"{images} has no val folder: the download is incomplete; fetch the dataset again")
    if not _is_flat(val):
        return folder.two_splits(train, val, cache)
    return _flat_val(train, val, _solution(base, base.absolute().parent), cache)


def _flat_val(train: Path, val: Path, solution: Path, cache: Path) -> Dataset:
    training = folder.training_split(train, cache)
    label = {name: i for i, name in enumerate(training.classes)}
    labels = {}
    for image, wnid in _read_solution(solution):
        if wnid not in label:
            raise UserError(f"{solution}: image {image} has class {wnid}, which is not in {train}")
        labels[image] = label[wnid]
    validation = file_index.list_flat(val, labels, training.classes)
    return folder.of_splits(training, validation, val, [(train, training.unused), (val, validation.unused)])


def _is_flat(val: Path) -> bool:
    with os.scandir(val) as entries:
        return not any(file_index.is_folder(entry) for entry in entries if not hidden(entry.name))


def _solution(*folders: Path) -> Path:
    for folder_ in folders:
        if (folder_ / _SOLUTION).is_file():
            return folder_ / _SOLUTION
    raise UserError(
        f"the validation images are not in class folders, and their labels are missing: "
        f"put Kaggle's {_SOLUTION} into {' or '.join(str(f) for f in folders)}"
    )


def _read_solution(path: Path) -> list[tuple[str, str]]:
    """Return (image, WNID) of every row.

    Raises:
        UserError: it is another file.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames is None or not {"ImageId", "PredictionString"} <= set(rows.fieldnames):
                raise UserError(f"{path} has no columns ImageId and PredictionString: is it Kaggle's {_SOLUTION}?")
            return [(row["ImageId"], (row["PredictionString"] or "").split(" ", 1)[0]) for row in rows]
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file ({error}): is it Kaggle's {_SOLUTION}?") from None
