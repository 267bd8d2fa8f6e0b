"""What a folder of shards holds, as bytes: the index of each split, and the page that describes them all.

=====================  ========================================================================================
file                   content
=====================  ========================================================================================
``index.json``         format and version; classes; of each split its samples, its fingerprint, and of each shard
                       its samples, its bytes and its identity; how the pictures were made
``SPLIT.index``        one `RECORD` a sample, in the order of the originals
``SPLIT-00000.tar``    pictures and labels, for `tar` and WebDataset; begins with the shard's identity
=====================  ========================================================================================

The identity of a shard is the SHA-256 of its part of the index. Since that part holds a checksum of every picture, a
shard, its part of the index, and the page vouch for one another.
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

# Little-endian, 40 bytes a sample.
RECORD = np.dtype(
    [
        ("offset", "<u8"),  # of the picture's first byte in its shard
        ("length", "<u4"),  # bytes of the picture
        ("shard", "<u4"),  # number
        ("label", "<i4"),
        ("width", "<u4"),  # of the decoded picture, pixels; 0: broken
        ("height", "<u4"),
        ("crc", "<u4"),  # CRC32C of the picture's bytes
        ("head", "<u4"),  # bytes of tar headers right before the picture
        ("kind", "u1"),  # `Kind`
        ("components", "u1"),  # channels as stored: 1 grey, 3 colours, 4 CMYK; 0: broken
        ("reserved", "<u2"),
    ]
)
Records = NDArray[np.void]


class Kind(IntEnum):
    """What the bytes of a sample are."""

    BROKEN = 0  # cannot be decoded; stored as it was
    JPEG = 1
    PNG = 2
    OTHER = 3  # what else `worldsize.data.decode` reads
    RAW = 4  # binary PPM whose last height x width x 3 bytes are the pixels


@dataclass(frozen=True)
class Shard:
    """One tar file: how many samples and bytes it has, and its identity (hex)."""

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
    """The page that describes a folder of shards.

    Attributes:
        classes: names in label order.
        splits: by name, all of `SPLITS`.
        made: how the pictures were made, for people; empty: they are the originals' bytes. `steps` reads it.
        plan: digest of everything that decides the shards' bytes but for the originals' content.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    made: Mapping[str, Any]
    plan: str

    def to_json(self) -> str:
        """The page's text; the same for the same content."""
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
        """The inverse; ``where`` names the page in messages.

        Raises:
            UserError: it is of a later version.
            DataError: it is damaged.
        """
        try:
            page = json.loads(text)
            if page["format"] != _FORMAT:
                raise ValueError("of another format")
            if page["version"] != _VERSION:
                raise UserError(f"{where} is of version {page['version']}, but worldsize reads {_VERSION}: update it")
            splits = {name: _split(page["splits"][name]) for name in SPLITS}
            classes = tuple(str(name) for name in page["classes"])
            return Packed(classes, splits, dict(page["made"]), str(page["plan"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{where} is damaged ({reason}): copy or pack the shards again") from None


def _split(page: Mapping[str, Any]) -> Split:
    split = Split(str(page["fingerprint"]), tuple(Shard(int(n), int(size), str(i)) for n, size, i in page["shards"]))
    if split.samples != page["samples"] or any(s.samples < 1 or s.bytes < 1 for s in split.shards):
        raise ValueError("its numbers of samples do not add up")
    return split


def steps(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was done to the pictures, first to last: shards can be packed again."""
    if not made:
        return []
    return [*steps(made.get("before", {})), {name: value for name, value in made.items() if name != "before"}]


def shard_name(split: str, number: int) -> str:
    """The file of a shard."""
    return f"{split}-{number:05d}.tar"


def identity(split: str, part: bytes | memoryview) -> str:
    """Of the shard whose part of the index this is (hex)."""
    digest = hashlib.sha256(split.encode() + b"\n")
    digest.update(part)
    return digest.hexdigest()
