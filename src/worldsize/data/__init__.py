"""Datasets: where samples come from, in which order, and how they become uint8 batches on the device.

To add a dataset, add a module to `datasets` with ``open_dataset(settings, cache) -> Dataset``, and its name to
`worldsize.config.recipe.DatasetName`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from worldsize.config.recipe import Data, DatasetName
from worldsize.data import shards
from worldsize.data.datasets import folder, relabel
from worldsize.data.datasets.file_index import is_folder
from worldsize.data.samples import Dataset, Samples
from worldsize.data.unused_files import hidden
from worldsize.errors import named_in, of_system, refuse_closed


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """Open the dataset that the recipe names. ``cache`` is a folder for cached file listings.

    Raises:
        UserError: the dataset is missing or does not have the expected layout, or its corrected labels do not fit it.
        StoreUnreachable: the disk or the store does not answer.
    """
    with _explained(settings):
        dataset = _given(settings, cache)
    return dataset if settings.labels is None else relabel.apply(dataset, settings.labels)


def open_validation(settings: Data, cache: Path) -> Samples:
    """Open the validation split alone: where it is a folder of class folders, the training images need not be there.

    Raises:
        UserError, StoreUnreachable: see `open_dataset`.
    """
    root = settings.root
    local = root is not None and shards.url_of(root) is None
    if root is None or not local or settings.labels is not None or settings.name not in ("folder", "imagenet"):
        return open_dataset(settings, cache).val
    with _explained(settings):
        validation = folder.validation_folder(root.expanduser())
        flat = settings.name == "imagenet" and validation is not None and _is_flat(validation)
        alone = None if flat else folder.open_validation(settings, cache)
    return alone or open_dataset(settings, cache).val


@contextmanager
def _explained(settings: Data) -> Iterator[None]:
    """Around looks at paths; the modules explain the usual errors."""
    try:
        if settings.root is not None and shards.url_of(settings.root) is None:
            refuse_closed(settings.root.expanduser())
        yield
    except OSError as error:
        raise of_system(f"cannot read {named_in(error) or settings.root}: {error.strerror or error}", error) from error


def _given(settings: Data, cache: Path) -> Dataset:
    """The dataset with its own labels."""
    if settings.root is not None and (url := shards.url_of(settings.root)) is not None and not settings.multilabel:
        folder.refuse_lists(settings, f"the shards at {url}")
        return shards.open_dataset(url)
    return cast(Dataset, importlib.import_module(f"worldsize.data.datasets.{settings.name}").open_dataset(settings, cache))


def open_layout(root: Path, name: DatasetName | None, cache: Path) -> Dataset:
    """Open the dataset in ``root``. Without a ``name``, detect the layout.

    Raises:
        UserError: see `open_dataset`.
    """
    with _explained(Data(root=root)):
        name = name or _detect(root.expanduser())
    return open_dataset(Data(name=name, root=root), cache)


def _detect(root: Path) -> DatasetName:
    if (root / "cifar-10-batches-py").is_dir():
        return "cifar10"
    if (root / "train.csv").is_file() and (root / "val.csv").is_file():
        return "multilabel"
    kaggle = (root / "Data").is_dir() or (root / "ILSVRC").is_dir()
    return "imagenet" if kaggle or _is_flat(root / "val") else "folder"


def _is_flat(val: Path) -> bool:
    try:
        with os.scandir(val) as entries:
            return not any(is_folder(entry) for entry in entries if not hidden(entry.name))
    except OSError:  # opening the dataset reports a better error
        return False
