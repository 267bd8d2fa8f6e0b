"""Reading whole pieces of files for the sake of the first byte that is wanted of them, and keeping them until they are used
up: for storage that answers slowly and sends fast."""

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
    """How a file is cut.

    Attributes:
        begins: int64 (n + 1,), rising: where each piece begins, and where the last one ends.
        uses: int64 (n,), how often each is read from, as a rule.
    """

    begins: NDArray[np.int64]
    uses: NDArray[np.int64]


@dataclass
class _Kept:
    left: int
    data: Future[Bytes] = field(default_factory=Future)


class Ahead(Store):
    """Another store, of whose files each piece is read at once.

    Args:
        store: the other one.
        pieces: of a file.
        most: how many pieces are kept at a time, at most; fewer as long as each is used as often as foreseen.
    """

    def __init__(self, store: Store, pieces: Callable[[str], Pieces], most: int) -> None:
        self.where = store.where
        self._store = store
        self._pieces = pieces
        self._most = most
        self._lock = threading.Lock()
        self._cuts: dict[str, Pieces] = {}
        self._kept: OrderedDict[tuple[str, int], _Kept] = OrderedDict()

    def whole(self, name: str) -> Bytes:
        return self._store.whole(name)

    def look(self, name: str, length: int) -> tuple[int, bytes]:
        return self._store.look(name, length)

    def peek(self, name: str, offset: int, length: int) -> Bytes:
        return self._store.peek(name, offset, length)

    def read(self, name: str, offset: int, length: int) -> Bytes:
        if length == 0:
            return b""
        cuts = self._cuts.get(name)
        if cuts is None:
            cuts = self._cuts[name] = self._pieces(name)
        number = int(np.searchsorted(cuts.begins, offset, side="right")) - 1
        if not 0 <= number < len(cuts.uses) or offset + length > cuts.begins[number + 1]:
            return self._store.read(name, offset, length)
        begin, end = (int(at) for at in cuts.begins[number : number + 2])
        data = self._piece((name, number), begin, end, int(cuts.uses[number]))
        return memoryview(data)[offset - begin : offset - begin + length]

    def _piece(self, key: tuple[str, int], begin: int, end: int, uses: int) -> Bytes:
        with self._lock:
            kept = self._kept.get(key)
            first = kept is None
            if kept is None:
                kept = self._kept[key] = _Kept(uses)
                if len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            kept.left -= 1
            if kept.left == 0:
                self._kept.pop(key, None)
            else:
                self._kept.move_to_end(key)
        if first:
            self._fetch(key, kept, begin, end)
        return kept.data.result()

    def _fetch(self, key: tuple[str, int], kept: _Kept, begin: int, end: int) -> None:
        """Read the piece; what cannot be read is tried again by the next who wants it."""
        try:
            kept.data.set_result(self._store.read(key[0], begin, end - begin))
        except BaseException as error:
            with self._lock:
                if self._kept.get(key) is kept:
                    del self._kept[key]
            kept.data.set_exception(error)
