"""Noise images for benchmarks: no disk, no decoding, and all classes look alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from worldsize.config.recipe import Data
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.data.sampling.random_numbers import Use, philox


def open_dataset(settings: Data, cache: Path) -> Dataset:
    """Make ``samples`` training images of ``classes`` classes, and as many for evaluation, up to 1,024."""
    return Dataset(
        _noise("synthetic train", settings.samples, settings.train_crop_size, settings.classes, 0),
        _noise("synthetic val", min(settings.samples, 1024), settings.val_resize_size, settings.classes, 1),
    )


def _noise(title: str, samples: int, size: int, classes: int, split: int) -> ArraySamples:
    # 64 distinct images are enough, and quick to generate.
    distinct = min(samples, 64)
    words = philox((np.arange(distinct * -(-size * size * 3 // 16)), split, 0, Use.SYNTHETIC), (0, 0))
    noise = words.T.astype(np.uint32, order="C").view(np.uint8).reshape(distinct, -1)[:, : size * size * 3]
    pixels = noise.reshape(distinct, size, size, 3)
    labels = (np.arange(samples) % classes).astype(np.int32)
    return ArraySamples(title, pixels, labels, tuple(str(i) for i in range(classes)))
