"""scikit-learn's handwritten digits: 1,797 real images that are part of that package.

The test set of Alpaydin and Kaynak's "Optical Recognition of Handwritten Digits" (UCI, 1998): 8 x 8 pixels,
17 gray levels. Every fifth image of a fixed shuffle is held out: 1,437 for training, 360 for evaluation.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image

from worldsize.config.recipe import Data
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.data.sampling.order import permute

_SPLIT_SEED = 1998


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """Open the digits, resized once (bilinear) to the sizes that the recipe trains and evaluates with."""
    table = _table()
    gray = np.rint(table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[:, 64].astype(np.int32)
    shuffled = permute(_SPLIT_SEED, 0, np.arange(len(gray)), len(gray))
    held_out = np.arange(len(gray)) % 5 == 0
    classes = tuple(str(digit) for digit in range(10))

    def split(title: str, chosen: np.ndarray, size: int) -> ArraySamples:
        return ArraySamples(title, _enlarge(gray[chosen], size), labels[chosen], classes)

    return Dataset(
        split("digits train", shuffled[~held_out], settings.train_crop_size),
        split("digits test", shuffled[held_out], settings.val_resize_size),
    )


def _table() -> np.ndarray:
    """(1797, 65): for each image, 64 pixels from 0 to 16, and the digit."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.submodule_search_locations is not None  # worldsize depends on it
    # The file that `sklearn.datasets.load_digits` reads. Importing that would take seconds in every process.
    file = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(file, delimiter=",")


def _enlarge(gray: np.ndarray, size: int) -> np.ndarray:
    large = [np.asarray(Image.fromarray(g).resize((size, size), Image.Resampling.BILINEAR)) for g in gray]
    return np.repeat(np.stack(large)[..., None], 3, axis=-1)
