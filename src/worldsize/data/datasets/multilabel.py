"""Images with several labels: one table per split, or one folder per label.

``ROOT/train.csv`` and ``ROOT/val.csv`` have a header and one row per image. The column ``image`` has its path relative to
ROOT. The labels are either in one column ``labels``, separated by semicolons, or in one column per label, as 0 and 1:

    image,labels                    image,cat,dog
    images/1.jpg,cat;dog            images/1.jpg,1,1
    images/2.jpg,                   images/2.jpg,0,0

Without tables, the layout is that of `worldsize.data.datasets.folder`, and files of a split with the same name, such as
``train/cat/1.jpg`` and ``train/dog/1.jpg``, are one image with both labels.

``data.label_list`` names one table for both splits instead: `worldsize.data.datasets.label_list`.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import numpy as np

from worldsize.config.recipe import Data
from worldsize.data import shards
from worldsize.data.datasets import file_index, folder, label_list
from worldsize.data.file_samples import FileSamples
from worldsize.data.samples import Dataset
from worldsize.data.unused_files import Unused
from worldsize.errors import UserError, of_system

_SEPARATOR = ";"
_ONE_HOT = {"0": False, "1": True}


@dataclass(frozen=True)
class Listing:
    """A split before its labels are numbered.

    Attributes:
        source: the table or the folder, for messages.
        root: what the paths of the images are relative to.
        labels: each image's labels, by its path; in the order of the samples.
        classes: the labels that images of the split may have.
        unused: images in its folders that are not in it.
        beside: names of the other files in the folders of its images, by folder, of a table.
    """

    source: Path
    root: Path
    labels: dict[str, frozenset[str]]
    classes: frozenset[str]
    unused: Unused = field(default_factory=Unused)
    beside: dict[str, set[str]] = field(default_factory=dict)


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """Open the dataset in ``settings.root``. The classes are the labels of the training split, sorted by their bytes.

    Listings of folders are cached in ``cache``.

    Raises:
        UserError: no root, packed shards, a split is missing or has no labels, a table is malformed or names an image that
            does not exist, the validation split has other labels, or files with the same name differ in size.
    """
    if settings.root is not None and (url := shards.url_of(settings.root)) is not None:
        raise UserError(f"{url}: data.name multilabel requires a folder, not a URL")
    root = folder.required_root(settings)
    if settings.label_list is not None:
        return label_list.open_dataset(root, settings.label_list, several=True)
    if shards.is_packed(root):
        raise UserError(f"{root} contains shards, which have one label per image: data.name multilabel requires files")
    train, val = _tables(root) if any(map(Path.is_file, _paths(root))) else _folders(root, cache)
    for split in (train, val):
        if not any(split.labels.values()):
            raise UserError(f"{split.source} has no image with a label")
    if unknown := sorted(val.classes - train.classes):
        named = ", ".join(unknown[:5]) + (" and more" if len(unknown) > 5 else "")
        raise UserError(f"{val.source} has labels that {train.source} does not have: {named}")
    classes = tuple(sorted(train.classes, key=os.fsencode))
    return folder.of_splits(
        _samples(train, classes),
        _samples(val, classes),
        val.source,
        [(split.source, split.unused) for split in (train, val)],
    )


def _samples(listing: Listing, classes: tuple[str, ...]) -> FileSamples:
    number = {name: i for i, name in enumerate(classes)}
    labels = np.zeros((len(listing.labels), len(classes)), np.uint8)
    for row, names in zip(labels, listing.labels.values(), strict=True):
        row[[number[name] for name in names]] = 1
    paths = [os.fsencode(path) for path in listing.labels]
    ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
    return FileSamples(listing.root, (), b"".join(paths), ends, labels, classes)


def _paths(root: Path) -> tuple[Path, Path]:
    return root / "train.csv", root / "val.csv"


def _tables(root: Path) -> tuple[Listing, Listing]:
    train, val = (read_table(path, root) for path in _paths(root))
    return replace(train, unused=_unnamed(train, val)), val


def _unnamed(train: Listing, val: Listing) -> Unused:
    """Images in the folders of either table that neither names."""
    folders = train.beside.keys() | val.beside.keys()
    tables = [table.beside for table in (train, val)]
    left = [set.intersection(*(beside[one] for beside in tables if one in beside)) for one in folders]
    return Unused(unnamed=sum(file_index.has_image_extension(name) and name[0] != "." for names in left for name in names))


def read_table(path: Path, root: Path) -> Listing:
    """Read the table ``path`` of images in ``root``.

    Raises:
        UserError: see `open_dataset`.
    """
    labels: dict[str, frozenset[str]] = {}
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file, strict=True)
            columns = _columns(next(rows, []), path)
            for row in filter(None, rows):
                where = f"{path}, line {rows.line_num}"
                image, names = _row(row, columns, where)
                if image in labels:
                    raise UserError(f"{where}: {image} has a row already: write all its labels in one row")
                labels[image] = names
    except OSError as error:
        raise of_system(f"cannot read {path}: {error.strerror}", error) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a CSV file in UTF-8: {error}") from None
    beside = file_index.require_files(labels, root, path)
    return Listing(path, root, labels, frozenset(columns or frozenset[str]().union(*labels.values())), beside=beside)


def _columns(header: list[str], path: Path) -> list[str] | None:
    """The labels in the header; None if the rows have a column ``labels``."""
    names = [name.strip() for name in header]
    if names == ["image", "labels"]:
        return None
    if names[:1] != ["image"] or len(names) < 2 or not all(names):
        raise UserError(
            f"{path} must begin with the header `image,labels`, or `image` and a column for each label; "
            f"its first line is {','.join(header)[:80]!r}"
        )
    if len(set(names)) < len(names):
        raise UserError(f"{path} has two columns {next(name for name in names if names.count(name) > 1)!r}")
    return names[1:]


def _row(row: list[str], columns: list[str] | None, where: str) -> tuple[str, frozenset[str]]:
    """The image and the labels of a row."""
    width = 2 if columns is None else 1 + len(columns)
    if len(row) != width:
        hint = f"; separate labels by {_SEPARATOR!r}" if columns is None else ""
        raise UserError(f"{where} has {len(row)} columns instead of {width}{hint}")
    image = PurePosixPath(row[0])
    if not image.name or image.is_absolute() or ".." in image.parts:
        raise UserError(f"{where}: {row[0]!r} is not the path of an image relative to the folder of the dataset")
    return image.as_posix(), _labels(row[1:], columns, where)


def _labels(cells: list[str], columns: list[str] | None, where: str) -> frozenset[str]:
    if columns is None:
        return frozenset(name.strip() for name in cells[0].split(_SEPARATOR)) - {""}
    for name, cell in zip(columns, cells, strict=True):
        if cell.strip() not in _ONE_HOT:
            raise UserError(f"{where}: column {name!r} has {cell!r} instead of 0 or 1")
    return frozenset(name for name, cell in zip(columns, cells, strict=True) if _ONE_HOT[cell.strip()])


def _folders(root: Path, cache: Path) -> tuple[Listing, Listing]:
    validation = folder.validation_folder(root)
    if not (root / "train").is_dir() or validation is None:
        raise UserError(
            f"{root} does not have the expected layout of images with several labels: {root}/train.csv and {root}/val.csv, "
            f"or the folders {root}/train/LABEL and {root}/val/LABEL"
        )
    return _folder(root / "train", cache), _folder(validation, cache)


def _folder(root: Path, cache: Path) -> Listing:
    files = file_index.list_classes(root, file_index.class_folders(root), cache)
    places: dict[str, list[str]] = {}
    for i in range(len(files)):
        label, _, name = files.path(i).partition("/")
        places.setdefault(name, []).append(label)
    labels = {f"{places[name][0]}/{name}": frozenset(places[name]) for name in sorted(places, key=os.fsencode)}
    for name, found in places.items():
        if len(found) > 1:
            _require_one_image(root, name, found)
    return Listing(root, root, labels, frozenset(files.classes), files.unused)


def _require_one_image(root: Path, name: str, folders: list[str]) -> None:
    first, *others = (root / label / name for label in folders)
    try:
        size = first.stat().st_size
        different = next((other for other in others if other.stat().st_size != size), None)
    except OSError as error:
        raise of_system(f"cannot read {error.filename}: {error.strerror}", error) from None
    if different is not None:
        raise UserError(
            f"{first} and {different} have the same name but different sizes: with data.name multilabel, files of a split "
            "with the same name are one image. Rename one of them"
        )
