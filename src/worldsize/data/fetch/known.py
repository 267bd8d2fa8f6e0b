"""Known properties of each dataset before it is fetched (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["imagenet", "cifar10", "folder"]

KAGGLE = "kaggle:"


@dataclass(frozen=True)
class Counts:
    """Numbers of classes and images of a dataset as a recipe reads it."""

    classes: int
    train: int
    val: int

    def __str__(self) -> str:
        return f"{self.classes:,} classes, {self.train:,} training and {self.val:,} validation images"


@dataclass(frozen=True)
class Known:
    """A dataset: its source and its expected contents.

    ``source`` is a URL, or `KAGGLE` followed by the name of a competition; None: the user must pass it. ``checksum`` is
    that of the archive, as ALGORITHM:DIGEST. ``archive_bytes`` and ``unpacked_bytes`` are estimates, for a source that
    does not report its size. ``roots`` are the folders that the dataset's reader expects at the top; a folder that
    encloses them is removed. Files whose names contain a part in ``unused`` are not unpacked.
    """

    roots: tuple[str, ...]
    source: str | None = None
    checksum: str | None = None
    archive_bytes: int = 0
    unpacked_bytes: int = 0
    counts: Counts | None = None
    unused: tuple[str, ...] = ()


KNOWN: dict[Name, Known] = {
    # Sizes of the official tar files of ILSVRC 2012 (137.7 + 6.3 + 12.7 GiB), which Kaggle's single archive contains
    # almost uncompressed. A third of its two million files are bounding boxes and images without labels.
    "imagenet": Known(
        roots=("ILSVRC", "Data", "train", "val"),
        source=f"{KAGGLE}imagenet-object-localization-challenge",
        archive_bytes=168_000_000_000,
        unpacked_bytes=158_000_000_000,
        counts=Counts(1000, 1_281_167, 50_000),
        unused=("/Annotations/CLS-LOC/", "/Data/CLS-LOC/test/"),
    ),
    # URL and MD5: www.cs.toronto.edu/~kriz/cifar.html
    "cifar10": Known(
        roots=("cifar-10-batches-py", "train"),
        source="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        checksum="md5:c58f30108f718f92721af3b95e74349a",
        counts=Counts(10, 50_000, 10_000),
    ),
    "folder": Known(roots=("train", "val", "validation", "test")),
}
