"""Reading shards: a split stored in a few large files, with a memory-mapped index."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldsize.data.images.pillow import BrokenImage
from worldsize.data.samples import EncodedSamples, Read, Stored
from worldsize.data.shards import tar
from worldsize.data.shards.ahead import Ahead, Pieces
from worldsize.data.shards.format import INDEX, RECORD, Encoding, Packed, Records, identity, shard_name
from worldsize.data.shards.store import Bytes, Checked, Store
from worldsize.errors import DataError

_PARALLEL_CHECKS = 16  # shards checked in parallel while opening, because remote stores have a high latency
_MAX_LISTED = 3  # shards listed in one message
_REMEDY = "copy the shards again, or pack them again"


class ShardSamples(EncodedSamples):
    """One split of a folder of shards.

    Opening checks the size and identity of every shard. A shard's part of the index is checked when an image of the shard
    is first read; an image's checksum is checked on every read.

    Args:
        store: the folder.
        split: its name.
        packed: the content of index.json.

    Attributes:
        records: (n,) of `RECORD`, memory-mapped.
        shards: samples, bytes and identity of each shard.
        made: how the images were converted; empty if they are unchanged.

    Raises:
        DataError: the index or a shard is missing, has the wrong size, or belongs to another packed dataset.
    """

    def __init__(self, store: Store, split: str, packed: Packed) -> None:
        self._store = store
        self._split = split
        self._packed = packed
        self.shards = packed.splits[split].shards
        self.classes = packed.classes
        self.fingerprint = packed.splits[split].fingerprint
        self.made = packed.made
        self.records: Records = self._index()
        self.labels = self.records["label"]
        self._starts = [0, *accumulate(shard.samples for shard in self.shards)]
        self._bounds = np.array(self._starts)
        self._verified = bytearray(len(self.shards))
        self._check_shards()

    def __reduce__(self) -> tuple[Any, ...]:
        opened = ShardSamples, (self._store, self._split, self._packed)
        if self.fingerprint == self._packed.splits[self._split].fingerprint:
            return opened
        return *opened, {"labels": self.labels, "fingerprint": self.fingerprint}

    def name(self, index: int) -> str:
        where = f"{self._store.where}/{shard_name(self._split, self.shard_of(index))}"
        return f"{where}: {self._path(index, self._store.peek)}"

    def path(self, index: int) -> str:
        """The path in the original dataset; the sample's number if the tar header cannot be read."""
        return self._path(index, self._store.read)

    def _path(self, index: int, read: Callable[[str, int, int], Bytes]) -> str:
        record = self.records[index]
        head = int(record["head"])
        try:
            blocks = read(shard_name(self._split, self.shard_of(index)), int(record["offset"]) - head, head)
        except (OSError, ValueError):
            return f"sample {index}"
        return tar.path_of(tar.member_name(blocks)) or f"sample {index}"

    def length(self, index: int) -> int:
        return int(self.records["length"][index])

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        chosen = self.records[indices]
        return np.stack([chosen["height"], chosen["width"]], axis=1).astype(np.int32)

    def encoded(self, index: int) -> Bytes:
        """The image's bytes.

        Raises:
            BrokenImage: the shard does not exist, or the checksum does not match.
            ReadFailed, Forbidden: it cannot be read, which says nothing about the image.
            DataError: the index is damaged.
        """
        (data,) = self._bytes(np.array([index]), self.records[[index]])
        if isinstance(data, BrokenImage):
            raise data
        return data

    def stored(self, index: int) -> Stored:
        (stored,) = self.several(np.array([index]))
        if isinstance(stored, BrokenImage):
            raise stored
        return stored

    @property
    def reads_many(self) -> bool:
        return self._store.reads_many

    def several(self, indices: NDArray[np.int64]) -> list[Read] | NDArray[np.uint8]:
        records = self.records[indices]
        together = self._pixels_of_one_size(indices, records)
        if together is not None:
            return together
        encoded = self._bytes(indices, records)
        rows = zip(
            encoded, records["kind"] == Encoding.RAW, records["height"].tolist(), records["width"].tolist(), strict=True
        )
        return [
            np.frombuffer(data, np.uint8)[-height * width * 3 :].reshape(height, width, 3)
            if raw and not isinstance(data, BrokenImage)
            else data
            for data, raw, height, width in rows
        ]

    def _pixels_of_one_size(self, indices: NDArray[np.int64], records: Records) -> NDArray[np.uint8] | None:
        """The pixels (n, height, width, 3) of intact images of one size that are stored as pixels; None for others."""
        first = records[:1]
        alike = all((records[field] == first[field]).all() for field in ("kind", "height", "width", "length"))
        if not (len(records) and alike and first["kind"] == Encoding.RAW):
            return None
        height, width, length = (int(first[field][0]) for field in ("height", "width", "length"))
        numbers, which = np.unique(np.searchsorted(self._bounds, indices, side="right") - 1, return_inverse=True)
        self._verify_parts(numbers.tolist())
        names = [shard_name(self._split, number) for number in numbers.tolist()]
        found = self._store.rows(names, which, records["offset"].astype(np.int64), length)
        if found is None or (found[1] != records["crc"]).any():
            return None
        return found[0][:, -height * width * 3 :].reshape(-1, height, width, 3)

    def _bytes(self, indices: NDArray[np.int64], records: Records) -> list[Bytes | BrokenImage]:
        """The images' bytes, or why they cannot be read."""
        numbers = [self.shard_of(index) for index in indices.tolist()]
        self._verify_parts(numbers)
        names = [shard_name(self._split, number) for number in numbers]
        offsets, lengths, sums = (records[field].tolist() for field in ("offset", "length", "crc"))
        results = self._store.several(list(zip(names, offsets, lengths, strict=True)))
        return [self._checked(*one) for one in zip(indices.tolist(), names, offsets, lengths, sums, results, strict=True)]

    def _checked(
        self, index: int, shard: str, offset: int, length: int, checksum: int, result: Checked | OSError
    ) -> Bytes | BrokenImage:
        if isinstance(result, OSError):
            return BrokenImage(f"cannot be read: {result.strerror or result}")
        if len(result[0]) != length or result[1] != checksum:
            return BrokenImage(f"{shard} is damaged at byte {offset:,}: wrong checksum of sample {index}")
        return result[0]

    def in_blocks(self, block: int, most: int) -> ShardSamples:
        numbers = {shard_name(self._split, number): number for number in range(len(self.shards))}
        # A block that continues in the next shard has two pieces.
        blocks = -(-len(self) // block)
        pieces = most * (blocks + len(self.shards)) // blocks + 1
        other = object.__new__(ShardSamples)
        other.__dict__ |= self.__dict__
        other._store = Ahead(self._store, lambda name: self._pieces(numbers[name], block), pieces)
        return other

    def shard_of(self, index: int) -> int:
        """The number of the shard that holds the image."""
        return bisect_right(self._starts, index) - 1

    def check_index(self) -> None:
        """Check the complete index; opening does not.

        Raises:
            DataError: it is damaged.
        """
        for number in range(len(self.shards)):
            self._verify_part(number)

    def read(self, index: int, offset: int, length: int) -> Bytes:
        """``length`` bytes of the shard that holds image ``index``, fewer at its end. Raises OSError."""
        return self._store.read(shard_name(self._split, self.shard_of(index)), offset, length)

    def _pieces(self, number: int, block: int) -> Pieces:
        """The pieces of a shard, one per block that overlaps it."""
        first, end = self._starts[number : number + 2]
        samples = np.array([first, *range((first // block + 1) * block, end, block)])
        last = self.records[end - 1]
        begins = np.append(self.records["offset"][samples], last["offset"] + last["length"]).astype(np.int64)
        return Pieces(begins, np.add.reduceat(self.records["length"][first:end] > 0, samples - first, dtype=np.int64))

    def _index(self) -> Records:
        name = f"{self._split}.index"
        expected = self._packed.splits[self._split].samples * RECORD.itemsize
        try:
            data = self._store.read_all(name)
        except OSError as error:
            raise DataError(f"{self._store.where}/{name} cannot be read ({error.strerror or error}): {_REMEDY}") from None
        if len(data) != expected:
            raise DataError(f"{self._store.where}/{name} has {len(data):,} bytes instead of {expected:,}: {_REMEDY}")
        return np.frombuffer(data, RECORD)

    def _check_shards(self) -> None:
        numbers = range(len(self.shards))
        runs = [numbers[start : start + 64] for start in range(0, len(numbers), 64)]
        with ThreadPoolExecutor(_PARALLEL_CHECKS) as pool:
            problems = [line for lines in pool.map(lambda run: list(self._problems(run)), runs) for line in lines]
        if problems:
            more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
            raise DataError(f"{self._store.where}: {'; '.join(problems[:_MAX_LISTED])}{more}: {_REMEDY}")

    def _problems(self, numbers: range) -> Iterator[str]:
        """Missing, unreadable or wrong files among these shards."""
        for number in numbers:
            shard, name = self.shards[number], shard_name(self._split, number)
            try:
                size, beginning = self._store.look(name, tar.BEGINNING)
            except FileNotFoundError:
                yield f"{name} is missing"
            except OSError as error:
                yield f"{name} cannot be read ({error.strerror or error})"
            else:
                if size != shard.bytes:
                    yield f"{name} has {size:,} bytes instead of {shard.bytes:,}"
                elif beginning != tar.beginning(shard.identity):
                    yield f"{name} is not the shard that {INDEX} describes"

    def _verify_parts(self, numbers: Iterable[int]) -> None:
        for number in {number for number in numbers if not self._verified[number]}:
            self._verify_part(number)

    def verify_index(self) -> None:
        """Check the parts of all shards in the index. Raises DataError."""
        self._verify_parts(range(len(self.shards)))

    def _verify_part(self, number: int) -> None:
        part, shard = self.records[self._starts[number] : self._starts[number + 1]], self.shards[number]
        if identity(self._split, part.tobytes()) != shard.identity or not _possible(part, shard.bytes, len(self.classes)):
            raise DataError(
                f"{self._store.where}/{self._split}.index is damaged in the part for {shard_name(self._split, number)}: "
                f"{_REMEDY}"
            )
        self._verified[number] = 1


def _possible(part: Records, size: int, classes: int) -> bool:
    """Whether a shard of ``size`` bytes can have these records: a forged index may have the identity of its shard."""
    offsets, lengths, labels, raw = part["offset"], part["length"], part["label"], part["kind"] == Encoding.RAW
    pixels = part["height"].astype(np.float64) * part["width"] * 3
    return bool(
        (offsets <= size).all()
        and (lengths <= size - offsets).all()
        and (part["head"] <= offsets).all()
        and ((labels >= 0) & (labels < classes)).all()
        and (part["kind"] <= max(Encoding)).all()
        and (pixels[raw] <= lengths[raw]).all()
    )
