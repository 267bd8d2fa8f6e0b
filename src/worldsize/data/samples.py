"""A split of a data set: labelled pictures by index. The interface that every data set offers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from worldsize.data.decode import BrokenPicture, decode

# A picture's bytes, or its pixels: uint8 (height, width, 3).
Stored = bytes | memoryview | NDArray[np.uint8]
# That of a picture that could be read, or why it could not.
Read = Stored | BrokenPicture


class Samples(ABC):
    """Pictures 0 .. len-1 with their labels.

    Attributes:
        labels: int32 (n,), each below ``len(classes)``.
        classes: the classes' names, in label order.
        fingerprint: changes when the set does (hex).
    """

    labels: NDArray[np.int32]
    classes: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def pixels(self) -> NDArray[np.uint8] | None:
        """All pictures as one (n, H, W, 3) array, where they are in memory."""
        return None

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call this picture in a message."""

    @abstractmethod
    def picture(self, index: int) -> Image.Image:
        """The picture, decoded, RGB.

        Raises:
            BrokenPicture: it cannot be read or decoded.
        """

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Heights and widths (n, 2) of these pictures, (0, 0) of broken ones; None where they are not known unread."""
        return None

    def in_blocks(self, block: int, most: int) -> Samples:
        """The same pictures for an order that wants each ``block`` of consecutive ones soon after one another.

        Where they lie one after the other, each such block is then read at once, and at most ``most`` are kept at a time.
        """
        return self


class EncodedSamples(Samples):
    """Pictures that are kept as bytes of some picture format. Everything may be called from many threads."""

    @property
    def together(self) -> bool:
        """Whether `several` costs hardly more than one; else it reads one after the other."""
        return False

    @abstractmethod
    def path(self, index: int) -> str:
        """Where the picture lies within its split: unique, relative, with ``/`` between."""

    @abstractmethod
    def length(self, index: int) -> int:
        """Bytes of the picture, without reading it.

        Raises:
            BrokenPicture: it is not there.
        """

    @abstractmethod
    def encoded(self, index: int) -> bytes | memoryview:
        """The picture's bytes.

        Raises:
            BrokenPicture: they cannot be read, or are not those that were written.
        """

    def stored(self, index: int) -> Stored:
        """What is kept of the picture: its bytes, or where it is kept raw its pixels.

        Raises:
            BrokenPicture: as of `encoded`.
        """
        return self.encoded(index)

    def several(self, indices: NDArray[np.int64]) -> list[Read]:
        """What `stored` gives of each, or raises: a broken one does not keep back the others."""
        return [_stored_or_why(self, int(index)) for index in indices]

    def picture(self, index: int) -> Image.Image:
        return as_picture(self.stored(index))


def _stored_or_why(samples: EncodedSamples, index: int) -> Read:
    try:
        return samples.stored(index)
    except BrokenPicture as error:
        return error


def as_picture(stored: Stored) -> Image.Image:
    """The picture, RGB.

    Raises:
        BrokenPicture: it cannot be decoded.
    """
    return Image.fromarray(stored) if isinstance(stored, np.ndarray) else decode(bytes(stored))


@dataclass(frozen=True)
class Dataset:
    """A training split and a validation split over the same classes."""

    train: Samples
    val: Samples

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What a checkpoint remembers of the data, to notice that it changed."""
        return {
            "train": self.train.fingerprint,
            "train_samples": len(self.train),
            "val": self.val.fingerprint,
            "val_samples": len(self.val),
        }


class ArraySamples(Samples):
    """Pictures that are in memory."""

    def __init__(self, title: str, pixels: NDArray[np.uint8], labels: NDArray[np.int32], classes: tuple[str, ...]) -> None:
        self._title = title
        self._pixels = pixels
        self.labels = labels
        self.classes = classes
        digest = hashlib.sha256(np.ascontiguousarray(pixels).data)
        digest.update(np.ascontiguousarray(labels).data)
        self.fingerprint = digest.hexdigest()

    @property
    def pixels(self) -> NDArray[np.uint8]:
        return self._pixels

    def name(self, index: int) -> str:
        return f"{self._title} #{index}"

    def picture(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index])


class FileSamples(EncodedSamples):
    """Pictures in files; the index costs the file name, 8 bytes of offset and 4 of label a sample.

    Args:
        root: the folder of the split.
        folders: each class's folder, relative to ``root`` ("" where the files lie flat).
        files: all file names (without folder), UTF-8, one after the other.
        ends: int64 (n,), where each name ends in ``files``.
        labels: int32 (n,).
        classes: names in label order.
    """

    def __init__(
        self,
        root: Path,
        folders: tuple[str, ...],
        files: bytes,
        ends: NDArray[np.int64],
        labels: NDArray[np.int32],
        classes: tuple[str, ...],
    ) -> None:
        self.root = root
        self.folders = folders
        self.files = files
        self.ends = ends
        self.labels = labels
        self.classes = classes
        digest = hashlib.sha256("\0".join((*classes, *folders)).encode("utf-8", "surrogateescape"))
        for part in (files, ends.tobytes(), labels.tobytes()):
            digest.update(part)
        self.fingerprint = digest.hexdigest()

    def name(self, index: int) -> str:
        return str(self._path(index))

    def path(self, index: int) -> str:
        return self._path(index).relative_to(self.root).as_posix()

    def length(self, index: int) -> int:
        with _explained():
            return self._path(index).stat().st_size

    def encoded(self, index: int) -> bytes:
        with _explained():
            return self._path(index).read_bytes()

    def _path(self, index: int) -> Path:
        start = int(self.ends[index - 1]) if index else 0
        file = self.files[start : int(self.ends[index])].decode("utf-8", "surrogateescape")
        return self.root / self.folders[self.labels[index]] / file


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BrokenPicture(f"cannot be read: {error.strerror}") from error
