"""A split of a dataset: labeled images by index. The interface that every dataset implements.

The images are either in memory (`ArraySamples`) or stored as bytes of an image format (`EncodedSamples`).
"""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from worldsize.data.images.pillow import BrokenImage, decode
from worldsize.distributed.world import World

# The encoded bytes of an image, or its pixels: uint8 (height, width, 3).
Stored = bytes | memoryview | NDArray[np.uint8]
# An image that was read, or why it could not be read.
Read = Stored | BrokenImage

_HASHED = 16_384  # images: more repetitions of the same ones would take minutes, and tell nothing


class NotAFile(BrokenImage):
    """The image's path is not a regular file, so it has no bytes to read or to pack."""


class Samples(ABC):
    """Images 0 .. len-1 and their labels.

    Attributes:
        labels: int32 (n,), each below ``len(classes)``; or, if images have several labels, uint8 (n, len(classes)), 1 for
            each label of an image and 0 for the others.
        classes: class names, in label order.
        fingerprint: hex; changes when the split changes.
    """

    labels: NDArray[np.int32] | NDArray[np.uint8]
    classes: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def multilabel(self) -> bool:
        """Whether an image can have several labels, or none."""
        return self.labels.ndim == 2

    def class_counts(self) -> NDArray[np.int64]:
        """The number of images of each class, (classes,)."""
        if self.multilabel:
            return self.labels.sum(0, dtype=np.int64)
        return np.bincount(self.labels, minlength=len(self.classes))

    def label_names(self, index: int) -> tuple[str, ...]:
        """The labels of an image, in the order of the classes."""
        label = self.labels[index]
        return tuple(self.classes[i] for i in (np.flatnonzero(label) if self.multilabel else [int(label)]))

    def relabeled(self, labels: NDArray[np.int32]) -> Samples:
        """The same images with other labels, int32 (n,), and another fingerprint."""
        other = object.__new__(type(self))
        other.__dict__ |= self.__dict__
        other.labels = labels
        other.fingerprint = hashlib.sha256(self.fingerprint.encode() + labels.tobytes()).hexdigest()
        return other

    @abstractmethod
    def name(self, index: int) -> str:
        """The image's name in messages."""

    def key(self, index: int) -> str:
        """What identifies the image in its split: its path, or its name if it is not stored as a file."""
        return self.name(index)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """Decode the image to RGB.

        Raises:
            BrokenImage: it cannot be read or decoded.
        """

    def share(self, world: World) -> None:  # noqa: B027 nothing to exchange about images in memory
        """Exchange between all ranks what they know of the images that were read. A collective: every rank must call it.

        Raises:
            DataChanged: ranks have read different contents of an image.
        """

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Heights and widths (n, 2) of these images, (0, 0) for broken ones; None if this requires reading them."""
        return None

    @property
    def reads_many(self) -> bool:
        """Whether `several` reads all images in about the time of one; otherwise it reads them one by one."""
        return False

    @abstractmethod
    def several(self, indices: NDArray[np.int64]) -> list[Read] | NDArray[np.uint8]:
        """These images as they are stored, or why they cannot be read: a broken image does not affect the others.

        One array (n, height, width, 3) if they are stored as pixels, all of one size, and none is broken.
        """

    def in_blocks(self, block: int, most: int) -> Samples:
        """The same images, for an order that needs the ``block`` consecutive images of a block close together in time.

        If they are stored consecutively, each block is read in one request, and at most ``most`` blocks are cached.
        """
        return self


class EncodedSamples(Samples):
    """Images stored as bytes of an image format. All methods are thread-safe.

    Errors of the disk or the network are no property of an image: reads are repeated, and then raise `ReadFailed`.
    """

    @abstractmethod
    def path(self, index: int) -> str:
        """The image's path in its split: unique, relative, separated by ``/``."""

    def key(self, index: int) -> str:
        return self.path(index)

    @abstractmethod
    def length(self, index: int) -> int:
        """The image's size in bytes, without reading it.

        Raises:
            BrokenImage: it does not exist, or is not a regular file (`NotAFile`).
        """

    @abstractmethod
    def encoded(self, index: int) -> bytes | memoryview:
        """The image's bytes.

        Raises:
            BrokenImage: they do not exist, or do not match their checksum.
            ReadFailed, Forbidden: they cannot be read, which says nothing about the image.
            DataChanged: they are not those that were read before, or were deleted since.
        """

    def opened(self, index: int) -> BinaryIO:
        """The image's bytes as a file: where it is one, only what is read of it is fetched.

        Raises:
            BrokenImage: see `encoded`.
        """
        return io.BytesIO(self.encoded(index))

    def stored(self, index: int) -> Stored:
        """The image as stored: its encoded bytes, or its pixels if it is stored raw.

        Raises:
            BrokenImage: see `encoded`.
        """
        return self.encoded(index)

    def several(self, indices: NDArray[np.int64]) -> list[Read] | NDArray[np.uint8]:
        """For each image, what `stored` returns or raises."""
        return [stored_or_error(self, int(index)) for index in indices]

    def image(self, index: int) -> Image.Image:
        return as_image(self.stored(index))


def stored_or_error(samples: EncodedSamples, index: int) -> Read:
    """What `EncodedSamples.stored` returns or raises."""
    try:
        return samples.stored(index)
    except BrokenImage as error:
        return error


def as_image(stored: Stored) -> Image.Image:
    """Decode a stored image to RGB.

    Raises:
        BrokenImage: it cannot be decoded.
    """
    return Image.fromarray(stored) if isinstance(stored, np.ndarray) else decode(bytes(stored))


@dataclass(frozen=True)
class Dataset:
    """A training split and a validation split over the same classes.

    Attributes:
        validates_on: where the validation images are, for messages; "" if there is nothing to say.
        notes: what the user should know about the files, such as those that are not used.
    """

    train: Samples
    val: Samples
    validates_on: str = ""
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def multilabel(self) -> bool:
        """Whether an image can have several labels, or none."""
        return self.train.multilabel

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What a checkpoint saves about the data, to detect changes."""
        return {
            "train": self.train.fingerprint,
            "train_samples": len(self.train),
            "val": self.val.fingerprint,
            "val_samples": len(self.val),
        }


class ArraySamples(Samples):
    """Images in memory.

    Args:
        pixels: uint8 (m, height, width, 3). Image i is ``pixels[i % m]``, so that a few can stand for many.
        labels: int32 (n,).
    """

    def __init__(self, title: str, pixels: NDArray[np.uint8], labels: NDArray[np.int32], classes: tuple[str, ...]) -> None:
        self._title = title
        self._pixels = np.ascontiguousarray(pixels)
        self.labels = labels
        self.classes = classes
        digest = hashlib.sha256()
        for start in range(0, min(len(labels), _HASHED), len(pixels)):
            digest.update(self._pixels[: len(labels) - start].data)
        digest.update(np.ascontiguousarray(labels).data)
        self.fingerprint = digest.hexdigest()

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """All images as one array, (n, height, width, 3)."""
        return self.several(np.arange(len(self)))

    def stored(self, index: int) -> NDArray[np.uint8]:
        """The image's pixels, (height, width, 3)."""
        return self._pixels[index % len(self._pixels)]

    def name(self, index: int) -> str:
        return f"{self._title} #{index}"

    @property
    def reads_many(self) -> bool:
        return True

    def several(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        return self._pixels[indices % len(self._pixels)]

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.stored(index))
