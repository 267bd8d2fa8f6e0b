"""Corrected labels from a CSV file (``--data.labels``, ``data pack --relabel``), without moving any image.

Columns, separated by commas, in any order; `worldsize labels` writes such a file:

- ``image``: see `Samples.key`; required;
- ``label``: the name of the correct class; required; empty: the given label stays;
- ``split``: train (default) or val;
- ``given``: the class that the dataset says; if present and not empty, it is checked;
- ``index``: the image's number in its split; makes it unnecessary to list the images of the dataset.

Other columns are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from worldsize.data.confusable_names import look_alikes
from worldsize.data.samples import Dataset, Samples
from worldsize.errors import UserError, did_you_mean, of_system

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Correction:
    """One line of the file; ``where`` is its file and number, ``given`` and ``index`` are None if they are not there."""

    where: str
    split: str
    image: str
    label: str
    given: str | None = None
    index: int | None = None


def apply(dataset: Dataset, path: Path) -> Dataset:
    """The same images with the labels of the file ``path``.

    Raises:
        UserError: the file cannot be read, names an unknown image or class, contradicts itself, or is about other labels;
            images have several labels.
    """
    if dataset.multilabel:
        raise UserError(f"{path}: corrected labels are for one label per image; edit the dataset's own tables")
    corrections = list(read(path))
    splits = {"train": dataset.train, "val": dataset.val}
    train, val = (_corrected(splits[name], [c for c in corrections if c.split == name]) for name in SPLITS)
    return replace(dataset, train=train, val=val)


def read(path: Path) -> Iterator[Correction]:
    """The lines of the file that have a label.

    Raises:
        UserError: it cannot be read, or a line is not as described above.
    """
    try:
        # utf-8-sig: Excel's "CSV UTF-8" begins with a byte order mark, which would be part of the first column's name.
        with open(path.expanduser(), newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames or ())
            for row in reader:
                if row["label"]:
                    yield _correction(row, f"{path}, line {reader.line_num}")
    except OSError as error:
        raise of_system(f"{path}: {error.strerror}", error) from None
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file: {error}") from None


def _check_columns(path: Path, names: Sequence[str]) -> None:
    missing = sorted({"image", "label"} - set(names))
    if missing and any(";" in name for name in names):
        raise UserError(f"{path} has columns separated by ';': save it with commas")
    if missing:
        raise UserError(f"{path} has no column {missing[0]}; corrected labels need image and label")


def _correction(row: dict[str, str], where: str) -> Correction:
    split, index = row.get("split") or SPLITS[0], row.get("index") or None
    if split not in SPLITS:
        raise UserError(f"{where}: split {split!r} must be {' or '.join(SPLITS)}")
    if index is not None and not (index.isascii() and index.isdigit()):
        raise UserError(f"{where}: index {index!r} must be a number")
    if not row["image"]:
        raise UserError(f"{where}: the image is missing")
    return Correction(where, split, row["image"], row["label"], row.get("given") or None, index and int(index))


def _corrected(samples: Samples, corrections: list[Correction]) -> Samples:
    """These samples, with the labels of ``corrections`` about them."""
    if not corrections:
        return samples
    labels = samples.labels.astype(np.int32)
    numbers = {name: number for number, name in enumerate(samples.classes)}
    seen: dict[int, Correction] = {}
    for one, place in zip(corrections, _places(samples, corrections), strict=True):
        for name in filter(None, (one.label, one.given)):
            if name not in numbers:
                hint = (
                    look_alikes([name], numbers)
                    or did_you_mean(name, numbers)
                    or f"; it has {len(samples.classes):,} classes"
                )
                raise UserError(f"{one.where}: the dataset has no class {name!r}{hint}")
        now = samples.classes[int(samples.labels[place])]
        if one.given is not None and one.given != now:
            raise UserError(f"{one.where}: the label of {one.image} is {now}, not {one.given}: the file is of other data")
        before = seen.setdefault(place, one)
        if before.label != one.label:
            raise UserError(f"{one.where}: {one.image} is {one.label} here and {before.label} in {before.where}")
        labels[place] = numbers[one.label]
    return samples.relabeled(labels)


def _places(samples: Samples, corrections: list[Correction]) -> list[int]:
    """The number of each image in its split."""
    found = [_at_index(samples, one) for one in corrections]
    if None in found:
        places = {samples.key(i): i for i in range(len(samples))}
        found = [places.get(one.image) if place is None else place for one, place in zip(corrections, found, strict=True)]
    for one, place in zip(corrections, found, strict=True):
        if place is None:
            raise UserError(f"{one.where}: the dataset has no image {one.image}")
    return [place for place in found if place is not None]


def _at_index(samples: Samples, one: Correction) -> int | None:
    """The index of the line, if that is its image."""
    if one.index is None or one.index >= len(samples) or samples.key(one.index) != one.image:
        return None
    return one.index
