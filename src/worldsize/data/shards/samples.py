"""Reading shards: a split whose pictures lie in a few large files, beside an index that is mapped and not copied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldsize.data.decode import BrokenPicture
from worldsize.data.samples import EncodedSamples, Read, Stored
from worldsize.data.shards import tar
from worldsize.data.shards.ahead import Ahead, Pieces
from worldsize.data.shards.format import INDEX, RECORD, Kind, Packed, Records, identity, shard_name
from worldsize.data.shards.store import Bytes, Checked, Store
from worldsize.errors import DataError

_AT_ONCE = 16  # shards that are looked at together while opening: a remote store answers slowly
_TOLD = 3  # shards that one message names
_AGAIN = "copy the shards again, or pack them again"


class ShardSamples(EncodedSamples):
    """One split of a folder of shards.

    Opening looks at the size and the identity of every shard. The index' part for a shard is checked when a picture of
    that shard is first read, each picture's checksum whenever it is read.

    Args:
        store: the folder.
        split: its name.
        packed: the folder's page.

    Attributes:
        records: (n,) of `RECORD`, mapped.
        shards: what the page says of each shard.
        made: how the pictures were made, empty where they are the originals' bytes.

    Raises:
        DataError: the index or a shard is missing, has another size, or belongs to another pack.
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
        self._firsts = [0, *accumulate(shard.samples for shard in self.shards)]
        self._vouched = bytearray(len(self.shards))
        self._look_at_shards()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSamples, (self._store, self._split, self._packed)

    def name(self, index: int) -> str:
        where = f"{self._store.where}/{shard_name(self._split, self.shard_of(index))}"
        return f"{where}: {self._path(index, self._store.peek)}"

    def path(self, index: int) -> str:
        """As of the originals; where that cannot be read any more, the sample's number."""
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
        """The picture's bytes.

        Raises:
            BrokenPicture: the shard cannot be read there, or the bytes do not have their checksum.
            DataError: the index is damaged.
        """
        (data,) = self._bytes(np.array([index]), self.records[[index]])
        if isinstance(data, BrokenPicture):
            raise data
        return data

    def stored(self, index: int) -> Stored:
        (stored,) = self.several(np.array([index]))
        if isinstance(stored, BrokenPicture):
            raise stored
        return stored

    @property
    def together(self) -> bool:
        return self._store.together

    def several(self, indices: NDArray[np.int64]) -> list[Read]:
        records = self.records[indices]
        found = self._bytes(indices, records)
        kept = zip(found, records["kind"] == Kind.RAW, records["height"].tolist(), records["width"].tolist(), strict=True)
        return [
            np.frombuffer(data, np.uint8)[-height * width * 3 :].reshape(height, width, 3)
            if raw and not isinstance(data, BrokenPicture)
            else data
            for data, raw, height, width in kept
        ]

    def _bytes(self, indices: NDArray[np.int64], records: Records) -> list[Bytes | BrokenPicture]:
        """The pictures' bytes, or why they cannot be had."""
        numbers = [self.shard_of(index) for index in indices.tolist()]
        for number in {number for number in numbers if not self._vouched[number]}:
            self._check_part(number)
        names = [shard_name(self._split, number) for number in numbers]
        offsets, lengths, sums = (records[field].tolist() for field in ("offset", "length", "crc"))
        found = self._store.several(list(zip(names, offsets, lengths, strict=True)))
        return [self._checked(*one) for one in zip(indices.tolist(), names, offsets, lengths, sums, found, strict=True)]

    def _checked(
        self, index: int, shard: str, offset: int, length: int, checksum: int, found: Checked | OSError
    ) -> Bytes | BrokenPicture:
        if isinstance(found, OSError):
            return BrokenPicture(f"cannot be read: {found.strerror or found}")
        if len(found[0]) != length or found[1] != checksum:
            return BrokenPicture(f"{shard} is damaged at byte {offset:,}: sample {index} does not have its checksum")
        return found[0]

    def in_blocks(self, block: int, most: int) -> ShardSamples:
        numbers = {shard_name(self._split, number): number for number in range(len(self.shards))}
        # A block that goes on in the next shard is two pieces.
        blocks = -(-len(self) // block)
        pieces = most * (blocks + len(self.shards)) // blocks + 1
        other = object.__new__(ShardSamples)
        other.__dict__ |= self.__dict__
        other._store = Ahead(self._store, lambda name: self._pieces(numbers[name], block), pieces)
        return other

    def shard_of(self, index: int) -> int:
        """The number of the shard that holds the picture."""
        return bisect_right(self._firsts, index) - 1

    def check_index(self) -> None:
        """Check all of the index, which opening does not.

        Raises:
            DataError: it is damaged.
        """
        for number in range(len(self.shards)):
            self._check_part(number)

    def read(self, index: int, offset: int, length: int) -> Bytes:
        """Bytes of the shard that holds picture ``index``, fewer where it ends before. Raises OSError."""
        return self._store.read(shard_name(self._split, self.shard_of(index)), offset, length)

    def _pieces(self, number: int, block: int) -> Pieces:
        """A shard's parts of the blocks."""
        first, end = self._firsts[number : number + 2]
        samples = np.array([first, *range((first // block + 1) * block, end, block)])
        last = self.records[end - 1]
        begins = np.append(self.records["offset"][samples], last["offset"] + last["length"]).astype(np.int64)
        return Pieces(begins, np.add.reduceat(self.records["length"][first:end] > 0, samples - first, dtype=np.int64))

    def _index(self) -> Records:
        name = f"{self._split}.index"
        expected = self._packed.splits[self._split].samples * RECORD.itemsize
        try:
            data = self._store.whole(name)
        except OSError as error:
            raise DataError(f"{self._store.where}/{name} cannot be read ({error.strerror or error}): {_AGAIN}") from None
        if len(data) != expected:
            raise DataError(f"{self._store.where}/{name} has {len(data):,} bytes, but should have {expected:,}: {_AGAIN}")
        return np.frombuffer(data, RECORD)

    def _look_at_shards(self) -> None:
        numbers = range(len(self.shards))
        runs = [numbers[start : start + 64] for start in range(0, len(numbers), 64)]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            wrong = [line for lines in pool.map(lambda run: list(self._wrong(run)), runs) for line in lines]
        if wrong:
            more = f"; and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
            raise DataError(f"{self._store.where}: {'; '.join(wrong[:_TOLD])}{more}: {_AGAIN}")

    def _wrong(self, numbers: range) -> Iterator[str]:
        """What is wrong with these shards as a whole."""
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
                    yield f"{name} has {size:,} bytes, but should have {shard.bytes:,}"
                elif beginning != tar.beginning(shard.identity):
                    yield f"{name} is not the shard that {INDEX} means"

    def _check_part(self, number: int) -> None:
        part = self.records[self._firsts[number] : self._firsts[number + 1]]
        labels = part["label"]
        right = identity(self._split, part.tobytes()) == self.shards[number].identity
        if not right or labels.min() < 0 or labels.max() >= len(self.classes):
            raise DataError(
                f"{self._store.where}/{self._split}.index is damaged where it describes {shard_name(self._split, number)}: "
                f"{_AGAIN}"
            )
        self._vouched[number] = 1
