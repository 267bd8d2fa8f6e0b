"""Any tree of pictures: ROOT/train/CLASS/PICTURE and ROOT/val/CLASS/PICTURE (or test, or validation); or shards."""

from __future__ import annotations

from pathlib import Path

from worldsize.data import index, shards
from worldsize.data.samples import Dataset, FileSamples
from worldsize.errors import UserError
from worldsize.recipe import Data

_VALIDATION = ("val", "validation", "test")


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """The data set in ``settings.root``, packed or not; listings are kept in ``cache``.

    Raises:
        UserError: no root, a split is missing, a class is empty, only one class, or the splits' classes differ.
    """
    root = required_root(settings)
    if shards.is_packed(root):
        return shards.open_dataset(root)
    validation = next((root / name for name in _VALIDATION if (root / name).is_dir()), None)
    if not (root / "train").is_dir() or validation is None:
        raise UserError(
            f"{root} is not laid out for training: expected {root}/train/CLASS/PICTURE and "
            f"{root}/val/CLASS/PICTURE (val may also be called {' or '.join(_VALIDATION[1:])}); "
            f"missing: {'train' if not (root / 'train').is_dir() else 'val'}"
        )
    return two_splits(root / "train", validation, cache)


def two_splits(train: Path, val: Path, cache: Path) -> Dataset:
    """A data set of two class trees, which must have the same classes."""
    training = training_split(train, cache)
    classes = tuple(index.class_folders(val))
    if classes != training.classes:
        raise UserError(f"the classes of {train} and {val} differ: {_difference(training.classes, classes)}")
    return Dataset(training, index.list_classes(val, classes, cache))


def training_split(train: Path, cache: Path) -> FileSamples:
    """The class tree ``train``, which must have at least two classes."""
    classes = index.class_folders(train)
    if len(classes) < 2:
        raise UserError(f"{train} has only one class, {classes[0]!r}: a classifier needs at least two")
    return index.list_classes(train, classes, cache)


def required_root(settings: Data) -> Path:
    """``settings.root``, which must name an existing folder."""
    if settings.root is None:
        raise UserError(f"data set {settings.name!r} needs the folder of its pictures: --data.root FOLDER")
    root = settings.root.expanduser()
    if not root.exists():
        raise UserError(f"--data.root {settings.root}: there is no such folder")
    if not root.is_dir():
        raise UserError(f"--data.root {settings.root} is a file, not a folder")
    return root


def _difference(train: tuple[str, ...], val: tuple[str, ...]) -> str:
    only_train, only_val = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    parts = [
        f"only in the {title}: {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}"
        for title, names in (("first", only_train), ("second", only_val))
        if names
    ]
    return "; ".join(parts)
