"""Notices that a file changes while a run reads it: each time, it must have the content that was first read."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from worldsize.distributed.world import World
from worldsize.errors import DataChanged

_SIZE_BITS = 30
_REMEDY = "put back what was there and resume the run, or start a new one"


class FileContents:
    """The contents of the files of a split, as a run first read them: a checksum and the size, 8 bytes per file.

    Not the modification times: hosts may have copies of their own, and a copy that is put back has another one.

    Args:
        count: files of the split.
    """

    def __init__(self, count: int) -> None:
        self._seen = np.zeros(count, np.int64)  # 0: not read yet
        self._complete = False

    def check(self, index: int, path: Path, content: bytes) -> None:
        """Compare what was read of file ``index`` with what was read before; thread-safe.

        Raises:
            DataChanged: they differ.
        """
        self.check_all(np.array([index]), np.array([len(content)]), np.array([crc32c(content)]), lambda _: path)

    def check_all(
        self,
        indices: NDArray[np.int64],
        sizes: NDArray[np.int64],
        checksums: NDArray[np.unsignedinteger],
        path: Callable[[int], Path],
    ) -> None:
        """`check` files of these sizes in bytes and CRC-32C, each (n,); ``path`` gives that of an index."""
        now = 1 + (checksums.astype(np.int64) << _SIZE_BITS | sizes % (1 << _SIZE_BITS))
        before = self._seen[indices]
        if ((before == 0) | (before == now)).all():
            self._seen[indices] = now
            before = self._seen[indices]  # of a file that is there twice, what was read last
        changed = np.flatnonzero((before != 0) & (before != now))
        if len(changed):
            i = int(changed[0])
            raise DataChanged(
                f"{path(int(indices[i]))} is not what this run first read there{_sizes(int(before[i]), int(now[i]))}: "
                f"it changed, or the hosts have different copies; {_REMEDY}"
            )

    def check_missing(self, index: int, path: Path, error: OSError) -> None:
        """If file ``index`` cannot be opened any more that was read before, raise.

        Raises:
            DataChanged: it was deleted.
        """
        if error.errno == errno.ENOENT and self._seen[index]:
            raise DataChanged(f"{path} was deleted since this run first read it; {_REMEDY}") from error

    def share(self, world: World) -> int | None:
        """Exchange between all ranks what they have read. A collective: every rank must call it.

        Returns:
            The first file of which this rank read another content than another rank; None if there is none.
        """
        if self._complete:  # on all ranks, which have the same values since then
            return None
        import torch

        own = self._seen.copy()  # threads may read ahead meanwhile
        world.maximum(merged := torch.from_numpy(own.copy()))
        self._complete = bool((merged != 0).all())
        differs = np.flatnonzero((own != 0) & (own != merged.numpy()))
        np.copyto(self._seen, merged.numpy(), where=self._seen == 0)
        return int(differs[0]) if len(differs) else None


def _sizes(before: int, now: int) -> str:
    sizes = [(value - 1) % (1 << _SIZE_BITS) for value in (before, now)]
    return f" ({sizes[0]:,} bytes then, {sizes[1]:,} now)" if sizes[0] != sizes[1] else ""
