"""scikit-learn's handwritten digits: 1,797 real pictures that come with that package.

The test part of Alpaydin and Kaynak's "Optical Recognition of Handwritten Digits" (UCI, 1998): 8 x 8 pixels,
17 grey levels. Every fifth picture of a fixed shuffle is held out: 1,437 to train, 360 to evaluate.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image

from worldsize.data.order import permute
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.recipe import Data

_SPLIT_SEED = 1998


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """The digits, enlarged once to the size the recipe trains and evaluates with (bilinear)."""
    table = _table()
    grey = np.rint(table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[:, 64].astype(np.int32)
    shuffled = permute(_SPLIT_SEED, 0, np.arange(len(grey)), len(grey))
    held_out = np.arange(len(grey)) % 5 == 0
    classes = tuple(str(digit) for digit in range(10))

    def split(title: str, chosen: np.ndarray, size: int) -> ArraySamples:
        return ArraySamples(title, _enlarge(grey[chosen], size), labels[chosen], classes)

    return Dataset(
        split("digits train", shuffled[~held_out], settings.train_crop_size),
        split("digits test", shuffled[held_out], settings.val_resize_size),
    )


def _table() -> np.ndarray:
    """(1797, 65): 64 pixels from 0 to 16 and the digit, of each picture."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.submodule_search_locations is not None  # worldsize depends on it
    # As `sklearn.datasets.load_digits` reads it, without the seconds that an import of that takes in every process.
    file = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(file, delimiter=",")


def _enlarge(grey: np.ndarray, size: int) -> np.ndarray:
    large = [np.asarray(Image.fromarray(g).resize((size, size), Image.Resampling.BILINEAR)) for g in grey]
    return np.repeat(np.stack(large)[..., None], 3, axis=-1)
