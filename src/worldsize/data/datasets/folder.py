"""A tree of images: ROOT/train/CLASS/IMAGE and ROOT/val/CLASS/IMAGE (or valid, validation, or test).

Also ROOT/CLASS/IMAGE with a list of the validation images, any tree with a list of all images and their labels, and shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from worldsize.config.recipe import Data
from worldsize.config.wording import quoted
from worldsize.data import shards
from worldsize.data.confusable_names import look_alikes
from worldsize.data.datasets import file_index, label_list, missing
from worldsize.data.datasets.validation_split import by_list
from worldsize.data.file_samples import FileSamples
from worldsize.data.samples import Dataset, Samples
from worldsize.data.unused_files import Unused
from worldsize.errors import UserError

_VALIDATION = ("val", "valid", "validation")
_TEST = "test"


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """Open the dataset in ``settings.root``, packed or not. File listings are cached in ``cache``.

    Raises:
        UserError: no root, a split is missing, a class is empty, only one class, or the splits have different classes.
    """
    root = required_root(settings)
    if settings.label_list is not None:
        return label_list.open_dataset(root, settings.label_list, several=False)
    if shards.is_packed(root):
        refuse_lists(settings, f"the shards in {root}")
        return shards.open_dataset(root)
    if settings.val_list is not None:
        return by_list(training_split(unsplit(root), cache), settings.val_list)
    validation = validation_folder(root)
    if not (root / "train").is_dir() or validation is None:
        raise UserError(
            f"{root} does not have the expected layout: {root}/train/CLASS/IMAGE and "
            f"{root}/val/CLASS/IMAGE (val may also be named {', '.join(_VALIDATION[1:])} or {_TEST}); "
            f"missing: {'train' if not (root / 'train').is_dir() else 'val'}. "
            f"For {root}/CLASS/IMAGE, `worldsize init {quoted(root)}` chooses validation images and writes a recipe"
        )
    return two_splits(root / "train", validation, cache)


def validation_folder(root: Path) -> Path | None:
    """The folder of validation images in ``root``, if there is one. ``test`` counts only if there is no other."""
    return next((root / name for name in (*_VALIDATION, _TEST) if (root / name).is_dir()), None)


def of_splits(train: FileSamples, val: FileSamples, validation: Path, unused: Sequence[tuple[Path, Unused]]) -> Dataset:
    """A dataset that validates on the folder ``validation``; ``unused`` by the folder where the images are."""
    notes = tuple(some.note(place) for place, some in unused if some)
    if validation.name == _TEST:
        warning = (
            f"{validation} is used as validation images, because there is no {', '.join(_VALIDATION)}: results on it choose "
            "the best checkpoint, so they are no test of it. Set aside other images as val"
        )
        notes = (warning, *notes)
    return Dataset(train, val, str(validation), notes)


def unsplit(root: Path) -> Path:
    """The folder with the class folders of a dataset without a validation folder."""
    return root / "train" if (root / "train").is_dir() else root


def two_splits(train: Path, val: Path, cache: Path) -> Dataset:
    """Make a dataset of two class trees, which must have the same classes."""
    training = training_split(train, cache)
    classes = tuple(file_index.class_folders(val))
    if classes != training.classes:
        difference = _difference(training.classes, classes)
        raise UserError(f"{train} and {val} have different classes: {difference}. Rename or remove those folders")
    validation = file_index.list_classes(val, classes, cache)
    return of_splits(training, validation, val, [(train, training.unused), (val, validation.unused)])


def open_validation(settings: Data, cache: Path) -> Samples | None:
    """The validation images alone, for which the training images need not be there.

    Returns:
        None if they cannot be opened alone: shards, images with a list, or another layout.

    Raises:
        UserError: see `open_dataset`.
    """
    root = required_root(settings)
    validation = validation_folder(root)
    if shards.is_packed(root) or settings.val_list is not None or settings.label_list is not None or validation is None:
        return None
    return file_index.list_classes(validation, file_index.class_folders(validation), cache)


def training_split(train: Path, cache: Path) -> FileSamples:
    """List the class tree ``train``, which must have at least two classes."""
    classes = file_index.class_folders(train)
    if len(classes) < 2:
        raise UserError(
            f"{train} has only one class, {classes[0]!r}: training a classifier requires at least two. Add another folder"
        )
    return file_index.list_classes(train, classes, cache)


def required_root(settings: Data) -> Path:
    """Return ``settings.root``, which must be an existing folder."""
    if settings.root is None:
        raise UserError(f"dataset {settings.name!r} requires the folder of its images: pass --data.root FOLDER")
    root = settings.root.expanduser()
    if not root.exists():
        raise missing.error(root, named=settings.root)
    if not root.is_dir():
        raise UserError(f"{settings.root} is a file, not a folder")
    return root


def refuse_lists(settings: Data, source: str) -> None:
    """Refuse a list of images for ``source``, which has its own splits: training would use images meant to be held out.

    Raises:
        UserError: there is such a list.
    """
    for flag, path in (("val-list", settings.val_list), ("label-list", settings.label_list)):
        if path is not None:
            raise UserError(
                f"--data.{flag} {path}: {source} have their own splits; leave out the list, or use class folders"
            )


def _difference(train: tuple[str, ...], val: tuple[str, ...]) -> str:
    only_train, only_val = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    parts = [
        f"only in {split}: {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}"
        for split, names in (("train", only_train), ("val", only_val))
        if names
    ]
    return "; ".join(parts) + look_alikes(only_train, only_val)
