"""Block read-ahead for high-latency storage: the first access to a block reads the complete block, and keeps it until all of
its images have been read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from worldsize.data.shards.store import Bytes, Store


@dataclass(frozen=True)
class Pieces:
    """How a file is divided into pieces.

    Attributes:
        begins: int64 (n + 1,), ascending: offset of each piece, then the end of the last one.
        uses: int64 (n,), expected number of reads from each piece.
    """

    begins: NDArray[np.int64]
    uses: NDArray[np.int64]


@dataclass
class _Cached:
    reads_left: int
    data: Future[Bytes] = field(default_factory=Future)


class Ahead(Store):
    """Wraps a store and reads each piece of its files with one request.

    Args:
        store: the wrapped store.
        pieces: gives the pieces of a file by its name.
        most: maximum number of cached pieces. A piece leaves the cache earlier once it has had its expected number of reads.
    """

    def __init__(self, store: Store, pieces: Callable[[str], Pieces], most: int) -> None:
        self.where = store.where
        self._store = store
        self._pieces = pieces
        self._most = most
        self._lock = threading.Lock()
        self._pieces_of: dict[str, Pieces] = {}
        self._cache: OrderedDict[tuple[str, int], _Cached] = OrderedDict()

    def read_all(self, name: str) -> Bytes:
        return self._store.read_all(name)

    def look(self, name: str, length: int) -> tuple[int, bytes]:
        return self._store.look(name, length)

    def peek(self, name: str, offset: int, length: int) -> Bytes:
        return self._store.peek(name, offset, length)

    def read(self, name: str, offset: int, length: int) -> Bytes:
        if length == 0:
            return b""
        pieces = self._pieces_of.get(name)
        if pieces is None:
            pieces = self._pieces_of[name] = self._pieces(name)
        number = int(np.searchsorted(pieces.begins, offset, side="right")) - 1
        if not 0 <= number < len(pieces.uses) or offset + length > pieces.begins[number + 1]:
            return self._store.read(name, offset, length)
        begin, end = (int(at) for at in pieces.begins[number : number + 2])
        data = self._piece((name, number), begin, end, int(pieces.uses[number]))
        return memoryview(data)[offset - begin : offset - begin + length]

    def _piece(self, key: tuple[str, int], begin: int, end: int, uses: int) -> Bytes:
        with self._lock:
            piece = self._cache.get(key)
            first = piece is None
            if piece is None:
                piece = self._cache[key] = _Cached(uses)
                if len(self._cache) > self._most:
                    self._cache.popitem(last=False)
            piece.reads_left -= 1
            if piece.reads_left == 0:
                self._cache.pop(key, None)
            else:
                self._cache.move_to_end(key)
        if first:
            self._fetch(key, piece, begin, end)
        return piece.data.result()

    def _fetch(self, key: tuple[str, int], piece: _Cached, begin: int, end: int) -> None:
        """Read the piece. A failed read is not cached: the next access retries it."""
        try:
            piece.data.set_result(self._store.read(key[0], begin, end - begin))
        except BaseException as error:
            with self._lock:
                if self._cache.get(key) is piece:
                    del self._cache[key]
            piece.data.set_exception(error)
