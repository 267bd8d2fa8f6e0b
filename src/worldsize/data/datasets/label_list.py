"""A list of images with their labels and splits: a CSV file, so that no image has to be moved or renamed.

    file,label,split
    photos/1.jpg,cat,train
    photos/2.jpg,dog,val
    photos/3.jpg,dog,test

``file`` is relative to the folder of the dataset. With one label per image, each image has one row. With several, it has one
row per label; an image without labels has one row with an empty label. Rows with the split ``test`` are checked, and used
neither to train nor to validate.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from worldsize.data.datasets import file_index
from worldsize.data.file_samples import FileSamples
from worldsize.data.samples import Dataset
from worldsize.errors import UserError

_HEADER = ["file", "label", "split"]
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Entry:
    """An image: its path relative to the folder of the dataset, its labels, and its split."""

    file: str
    labels: tuple[str, ...]
    split: str


def write(entries: Iterable[Entry]) -> bytes:
    """The content of a list."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_HEADER)
    for one in entries:
        rows.writerows([one.file, label, one.split] for label in one.labels or ("",))
    return text.getvalue().encode("utf-8", "surrogateescape")


def open_dataset(root: Path, listing: Path, several: bool) -> Dataset:
    """The images in ``root`` that the file ``listing`` names; ``several``: an image may have several labels, or none.

    The classes are the labels of the training split, sorted by their bytes.

    Raises:
        UserError: the file cannot be read, contradicts itself, names a missing image, or has fewer than two classes; a split
            is missing, or has labels that the training split does not have.
    """
    entries = read(listing, several)
    file_index.require_files((one.file for one in entries), root, listing)
    train, val = ([one for one in entries if one.split == split] for split in SPLITS[:2])
    for split, found in zip(SPLITS, (train, val), strict=False):
        if not found:
            raise UserError(f"{listing} names no image with the split {split}")
    classes = tuple(sorted({label for one in train for label in one.labels}, key=os.fsencode))
    if len(classes) < 2:
        found_classes = f"only the label {classes[0]!r}" if classes else "no label"
        raise UserError(f"{listing} has {found_classes} in the training split: training a classifier requires at least two")
    if unknown := sorted({label for one in val for label in one.labels} - set(classes)):
        named = ", ".join(unknown[:5]) + (" and more" if len(unknown) > 5 else "")
        raise UserError(f"{listing}: the validation split has labels that the training split does not have: {named}")
    return Dataset(samples(root, train, classes, several), samples(root, val, classes, several))


def samples(root: Path, entries: list[Entry], classes: tuple[str, ...], several: bool) -> FileSamples:
    """The images of ``entries`` as a split; ``several``: an image may have several labels, or none."""
    number = {name: i for i, name in enumerate(classes)}
    if several:
        labels = np.zeros((len(entries), len(classes)), np.uint8)
        for row, one in zip(labels, entries, strict=True):
            row[[number[name] for name in one.labels]] = 1
    else:
        labels = np.array([number[one.labels[0]] for one in entries], np.int32)
    paths = [os.fsencode(one.file) for one in entries]
    ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
    return FileSamples(root, (), b"".join(paths), ends, labels, classes)


def read(listing: Path, several: bool) -> list[Entry]:
    """The images of the file, in the order of their first rows.

    Raises:
        UserError: it cannot be read, or a row is not as described above.
    """
    labels: dict[str, list[str]] = {}
    splits: dict[str, str] = {}
    try:
        with open(listing.expanduser(), newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = csv.reader(file, strict=True)
            if (header := next(rows, [])) != _HEADER:
                raise UserError(
                    f"{listing} must begin with the line {','.join(_HEADER)}; it begins with {','.join(header)!r}"
                )
            for row in filter(None, rows):
                _add(row, f"{listing}, line {rows.line_num}", several, labels, splits)
    except OSError as error:
        raise UserError(f"--data.label-list {listing}: {error.strerror}") from None
    except csv.Error as error:
        raise UserError(f"{listing} is not a CSV file: {error}") from None
    return [Entry(file, tuple(names), splits[file]) for file, names in labels.items()]


def _add(row: list[str], where: str, several: bool, labels: dict[str, list[str]], splits: dict[str, str]) -> None:
    if len(row) != len(_HEADER):
        raise UserError(f"{where} has {len(row)} columns instead of {len(_HEADER)}")
    name, label, split = row
    path = PurePosixPath(name)
    if not path.name or path.is_absolute() or ".." in path.parts:
        raise UserError(f"{where}: {name!r} is not the path of an image relative to the folder of the dataset")
    if split not in SPLITS:
        raise UserError(f"{where}: split {split!r} must be {', '.join(SPLITS[:-1])} or {SPLITS[-1]}")
    if not label and not several:
        raise UserError(f"{where}: {name} has no label")
    image = path.as_posix()
    if splits.setdefault(image, split) != split:
        raise UserError(f"{where}: {name} is in the split {split} here and in {splits[image]} above")
    names = labels.setdefault(image, [])
    if names and not several:
        raise UserError(f"{where}: {name} has a label already, {names[0]!r}: images with several need data.name multilabel")
    if label and label not in names:
        names.append(label)
