"""ImageNet (ILSVRC 2012), as torchvision lays it out or as Kaggle delivers it.

Kaggle's "ImageNet Object Localization Challenge" unpacks to ``ILSVRC/Data/CLS-LOC/train/WNID/*.JPEG``, a flat
``ILSVRC/Data/CLS-LOC/val/*.JPEG``, and ``LOC_val_solution.csv`` (``ImageId,PredictionString`` where the
prediction begins with the picture's WNID) beside ``ILSVRC``.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

from worldsize.data import folder, index, shards
from worldsize.data.samples import Dataset
from worldsize.errors import UserError
from worldsize.recipe import Data

_SOLUTION = "LOC_val_solution.csv"


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """ImageNet in ``settings.root``: the folder that holds ``train`` and ``val``, or ``ILSVRC``, or is it; or its shards.

    Raises:
        UserError: neither layout, or the validation pictures have no labels.
    """
    root = folder.required_root(settings)
    if shards.is_packed(root):
        return shards.open_dataset(root)
    for kaggle in (root, root / "ILSVRC"):
        pictures = kaggle / "Data" / "CLS-LOC"
        if pictures.is_dir():
            return _kaggle(kaggle, pictures, cache)
    if (root / "train").is_dir() and (root / "val").is_dir():
        if _is_flat(root / "val"):
            return _flat_val(root / "train", root / "val", _solution(root, root.absolute().parent), cache)
        return folder.two_splits(root / "train", root / "val", cache)
    raise UserError(
        f"{root} holds no ImageNet: expected {root}/train and {root}/val, "
        f"or Kaggle's {root}/Data/CLS-LOC or {root}/ILSVRC/Data/CLS-LOC"
    )


def _kaggle(base: Path, pictures: Path, cache: Path) -> Dataset:
    train, val = pictures / "train", pictures / "val"
    if not val.is_dir():
        raise UserError(f"{pictures} has no val folder: the download is incomplete")
    if not _is_flat(val):
        return folder.two_splits(train, val, cache)
    return _flat_val(train, val, _solution(base, base.absolute().parent), cache)


def _flat_val(train: Path, val: Path, solution: Path, cache: Path) -> Dataset:
    training = folder.training_split(train, cache)
    label = {name: i for i, name in enumerate(training.classes)}
    labels = {}
    for image, wnid in _read_solution(solution):
        if wnid not in label:
            raise UserError(f"{solution}: picture {image} is of class {wnid}, which {train} does not have")
        labels[image] = label[wnid]
    return Dataset(training, index.list_flat(val, labels, training.classes))


def _is_flat(val: Path) -> bool:
    with os.scandir(val) as entries:
        return not any(entry.is_dir() for entry in entries if not entry.name.startswith("."))


def _solution(*folders: Path) -> Path:
    for place in folders:
        if (place / _SOLUTION).is_file():
            return place / _SOLUTION
    raise UserError(
        f"the validation pictures lie flat, without class folders, and their labels are missing: "
        f"put Kaggle's {_SOLUTION} into {' or '.join(str(f) for f in folders)}"
    )


def _read_solution(path: Path) -> list[tuple[str, str]]:
    """(picture, WNID) of every row."""
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames is None or not {"ImageId", "PredictionString"} <= set(rows.fieldnames):
            raise UserError(f"{path} has no columns ImageId and PredictionString: is it Kaggle's {_SOLUTION}?")
        return [(row["ImageId"], (row["PredictionString"] or "").split(" ", 1)[0]) for row in rows]
