"""The on-disk format of a folder of shards.

=====================  ========================================================================================
file                   content
=====================  ========================================================================================
``index.json``         metadata: format and version; classes; the number of samples and the fingerprint of each split;
                       samples, bytes and identity of each shard; how the images were converted
``SPLIT.index``        one `RECORD` per sample, in the order of the original dataset
``SPLIT-00000.tar``    images and labels, readable by `tar` and WebDataset; starts with the shard's identity
=====================  ========================================================================================

The identity of a shard is the SHA-256 of its part of ``SPLIT.index``. That part holds a checksum of every image, so a
shard, its part of the index and ``index.json`` can be verified against each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldsize.errors import DataError, UserError

INDEX = "index.json"
SPLITS = ("train", "val")
_FORMAT, _VERSION = "worldsize shards", 1

# Little-endian, 40 bytes per sample.
RECORD = np.dtype(
    [
        ("offset", "<u8"),  # of the image's first byte in its shard
        ("length", "<u4"),  # bytes of the image
        ("shard", "<u4"),  # number of the shard
        ("label", "<i4"),
        ("width", "<u4"),  # of the decoded image, pixels; 0: broken
        ("height", "<u4"),
        ("crc", "<u4"),  # CRC32C of the image's bytes
        ("head", "<u4"),  # bytes of tar headers immediately before the image
        ("kind", "u1"),  # `Encoding`
        ("components", "u1"),  # channels as stored: 1 grayscale, 3 color, 4 CMYK; 0: broken
        ("reserved", "<u2"),
    ]
)
Records = NDArray[np.void]


class Encoding(IntEnum):
    """How the bytes of a sample are encoded."""

    BROKEN = 0  # cannot be decoded; stored unchanged
    JPEG = 1
    PNG = 2
    OTHER = 3  # another format that `worldsize.data.images.pillow` reads
    RAW = 4  # binary PPM whose last height x width x 3 bytes are the pixels


@dataclass(frozen=True)
class Shard:
    """One tar file: its number of samples, its size in bytes, and its identity (hex)."""

    samples: int
    bytes: int
    identity: str


@dataclass(frozen=True)
class Split:
    """The shards of a split, in order."""

    fingerprint: str
    shards: tuple[Shard, ...]

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)


@dataclass(frozen=True)
class Packed:
    """The content of index.json.

    Attributes:
        classes: names in label order.
        splits: by name, all of `SPLITS`.
        made: how the images were converted, for display; empty if they are unchanged. `steps` parses it.
        plan: digest of everything that determines the shards' bytes, except the content of the original images.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    made: Mapping[str, Any]
    plan: str

    def to_json(self) -> str:
        """The file's text; equal objects give equal text."""
        splits = {
            name: {
                "samples": split.samples,
                "fingerprint": split.fingerprint,
                "shards": [[s.samples, s.bytes, s.identity] for s in split.shards],
            }
            for name, split in self.splits.items()
        }
        head = {"format": _FORMAT, "version": _VERSION, "made": dict(self.made), "plan": self.plan}
        return json.dumps(head | {"classes": list(self.classes), "splits": splits}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str) -> Packed:
        """The inverse of `to_json`; ``where`` names the file in messages.

        Raises:
            UserError: it has a newer format version.
            DataError: it is damaged.
        """
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError("unknown format")
            if (version := content["version"]) != _VERSION:
                raise UserError(f"{where} has format version {version}; this worldsize reads {_VERSION}: update worldsize")
            splits = {name: _split(content["splits"][name]) for name in SPLITS}
            classes = tuple(str(name) for name in content["classes"])
            return Packed(classes, splits, dict(content["made"]), str(content["plan"]))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{where} is damaged ({reason}): copy the shards again, or pack them again") from None


def _split(content: Mapping[str, Any]) -> Split:
    split = Split(str(content["fingerprint"]), tuple(Shard(int(n), int(size), str(i)) for n, size, i in content["shards"]))
    if split.samples != content["samples"] or any(s.samples < 1 or s.bytes < 1 for s in split.shards):
        raise ValueError("the numbers of samples do not add up")
    return split


def steps(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversions that the images went through, in order: shards can be packed into new shards."""
    if not made:
        return []
    return [*steps(made.get("before", {})), {name: value for name, value in made.items() if name != "before"}]


def shard_name(split: str, number: int) -> str:
    """The file name of a shard."""
    return f"{split}-{number:05d}.tar"


def identity(split: str, part: bytes | memoryview) -> str:
    """The identity (hex) of the shard that has this part of the index."""
    digest = hashlib.sha256(split.encode() + b"\n")
    digest.update(part)
    return digest.hexdigest()
