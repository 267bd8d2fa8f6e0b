"""What is known of each data set before it is fetched (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["imagenet", "cifar10", "folder"]

KAGGLE = "kaggle:"


@dataclass(frozen=True)
class Counts:
    """Of a data set as a recipe sees it."""

    classes: int
    train: int
    val: int

    def __str__(self) -> str:
        return f"{self.classes:,} classes, {self.train:,} pictures to train and {self.val:,} to evaluate"


@dataclass(frozen=True)
class Known:
    """A data set: where it is to be had, and what it must turn out to be.

    ``source`` is a URL, or `KAGGLE` and the name of a competition; None: only the user knows. ``checksum`` of the
    archive there is ALGORITHM:DIGEST. ``archive_bytes`` and ``unpacked_bytes`` are estimates for a source that does
    not tell. ``roots`` are the folders that the data set's reader looks for: a folder around them is left out.
    ``unused`` are parts of names that no reader needs.
    """

    roots: tuple[str, ...]
    source: str | None = None
    checksum: str | None = None
    archive_bytes: int = 0
    unpacked_bytes: int = 0
    counts: Counts | None = None
    unused: tuple[str, ...] = ()


KNOWN: dict[Name, Known] = {
    # The sizes are those of the official tar files of ILSVRC 2012 (137.7 + 6.3 + 12.7 GiB), which Kaggle's one archive
    # holds, all but uncompressed. A third of its two million files are boxes and pictures without labels.
    "imagenet": Known(
        roots=("ILSVRC", "Data", "train", "val"),
        source=f"{KAGGLE}imagenet-object-localization-challenge",
        archive_bytes=168_000_000_000,
        unpacked_bytes=158_000_000_000,
        counts=Counts(1000, 1_281_167, 50_000),
        unused=("/Annotations/CLS-LOC/", "/Data/CLS-LOC/test/"),
    ),
    # www.cs.toronto.edu/~kriz/cifar.html names address and MD5.
    "cifar10": Known(
        roots=("cifar-10-batches-py", "train"),
        source="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        checksum="md5:c58f30108f718f92721af3b95e74349a",
        counts=Counts(10, 50_000, 10_000),
    ),
    "folder": Known(roots=("train", "val", "validation", "test")),
}
