"""Where samples come from, in which order, and how they become uint8 batches on the device.

A data set is one module of this package with ``open_dataset(settings, cache) -> Dataset``, and its name in
`worldsize.recipe.DatasetName`.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import cast

from worldsize.data import shards
from worldsize.data.samples import Dataset
from worldsize.recipe import Data, DatasetName


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """The data set the recipe names; ``cache`` is a folder for listings.

    Raises:
        UserError: it is not there, or not laid out as it should be.
    """
    if settings.root is not None and (url := shards.url_of(settings.root)) is not None:
        return shards.open_dataset(url)
    return cast(Dataset, importlib.import_module(f"worldsize.data.{settings.name}").open_dataset(settings, cache))


def open_layout(root: Path, name: DatasetName | None, cache: Path) -> Dataset:
    """The data set in ``root``; without a ``name``, the one that it looks like.

    Raises:
        UserError: as of `open_dataset`.
    """
    return open_dataset(Data(name=name or _name_of(root.expanduser()), root=root), cache)


def _name_of(root: Path) -> DatasetName:
    if (root / "cifar-10-batches-py").is_dir():
        return "cifar10"
    kaggle = (root / "Data").is_dir() or (root / "ILSVRC").is_dir()
    return "imagenet" if kaggle or _is_flat(root / "val") else "folder"


def _is_flat(val: Path) -> bool:
    try:
        return not any(entry.is_dir() for entry in os.scandir(val))
    except OSError:  # whoever opens the data set says it better
        return False
