"""Sizes of the datasets that everybody has alike, for what is asked before the files are there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Numbers of images and classes; ``file_kb``: mean size of an image file, kB, 0 if the images are in memory."""

    train: int
    val: int
    classes: int
    file_kb: float


# The files of ImageNet: 1,000 of them, one per class, have 109.6 kB on average.
SIZES = {
    "imagenet": Size(1_281_167, 50_000, 1000, 110.0),
    "cifar10": Size(50_000, 10_000, 10, 2.0),
    "digits": Size(1437, 360, 10, 0.0),
}
