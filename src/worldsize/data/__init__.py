"""Where samples come from, in which order, and how they become uint8 batches on the device.

A data set is one module of this package with ``open_dataset(settings, cache) -> Dataset``, and its name in
`worldsize.recipe.DatasetName`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from worldsize.data.samples import Dataset
from worldsize.recipe import Data


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """The data set the recipe names; ``cache`` is a folder for listings.

    Raises:
        UserError: it is not there, or not laid out as it should be.
    """
    return cast(Dataset, importlib.import_module(f"worldsize.data.{settings.name}").open_dataset(settings, cache))
