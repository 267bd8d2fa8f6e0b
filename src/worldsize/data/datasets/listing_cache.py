"""The cache of folder listings, and when it may be trusted.

A listing is trusted while each folder's modification time, change time, inode and size stay the same, and only on file
systems of this machine whose kernel sets the change time itself: `touch` and archives cannot set it. Network file systems,
object stores and image layers may report the same times for other content, and so may an image that is mounted read-only:
there, the folder is listed again for each run.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worldsize.data.unused_files import Unused
from worldsize.errors import of_system, only_readable
from worldsize.runs.atomic import replacing

log = logging.getLogger(__name__)

_VERSION = 4
# f_type of statfs: ext2 to ext4, XFS, Btrfs, F2FS, ZFS, bcachefs, tmpfs.
_LOCAL = frozenset((0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E, 0x01021994))
# A change within the same tick of the kernel's clock as the one before it may leave the times as they are.
_TICK_S = 0.05


@dataclass(frozen=True)
class Listing:
    """``files`` has the names without separators, ``ends`` int64 (n,) their ends in it, ``labels`` is int32 (n,)."""

    files: bytes
    ends: NDArray[np.int64]
    labels: NDArray[np.int32]
    unused: Unused


def of_folders(root: Path, names: Sequence[str], store: Path, make: Callable[[], Listing]) -> Listing:
    """The listing of these folders in ``root``: from the file ``store`` if it can be trusted, otherwise from ``make``.

    Raises:
        UserError: a folder is missing or unreadable.
        StoreUnreachable: its disk does not answer.
    """
    stamp = _stamp([root, *(root / name for name in names)])
    if stamp is None:
        return make()
    stamp = hashlib.sha256(b"\0".join([stamp.encode(), *map(os.fsencode, names)])).hexdigest()
    cached = _load(store, stamp)
    if cached is not None:
        return cached
    listing = make()
    unused = listing.unused
    # The stamp covers neither other folders nor contents.
    if not (unused.nested or unused.in_system_folders or unused.opened):
        _save(store, stamp, listing)
    return listing


def _stamp(folders: Sequence[Path]) -> str | None:
    """What changes whenever a name in the folders changes; None if their file systems do not promise that."""
    found = _statuses(folders)
    if not all(_is_trusted(path) for path in {status.st_dev: path for path, status in found}.values()):
        return None
    age = time.time() - max((status.st_ctime for _, status in found), default=0.0)
    if age < 0:
        return None  # the clock was set back, and the same time comes again
    if age < _TICK_S:
        time.sleep(_TICK_S - age)
        found = _statuses(folders)
    digest = hashlib.sha256(f"{_VERSION}".encode())
    for _, status in found:
        numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(b"%d,%d,%d,%d,%d\0" % numbers)
    return digest.hexdigest()


def _statuses(folders: Sequence[Path]) -> list[tuple[Path, os.stat_result]]:
    try:
        return [(path, os.stat(path)) for path in folders]
    except OSError as error:
        raise of_system(f"cannot read {error.filename}: {error.strerror}", error) from None


def _is_trusted(path: Path) -> bool:
    """Whether the kernel sets the change time of folders on this file system."""
    try:
        return _kind(path) in _LOCAL and not os.statvfs(path).f_flag & os.ST_RDONLY
    except OSError:
        return False


def _kind(path: Path) -> int:
    """The type of the file system; 0 if it is unknown. Raises OSError."""
    if sys.platform != "linux":
        return 0
    found = (ctypes.c_long * 64)()  # struct statfs, which begins with f_type, is smaller
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found[0]) & 0xFFFFFFFF


def _load(store: Path, stamp: str) -> Listing | None:
    try:
        with np.load(store, allow_pickle=False) as saved:
            if str(saved["stamp"]) == stamp:
                unused = Unused.from_json(str(saved["unused"]))
                return Listing(saved["files"].tobytes(), saved["ends"], saved["labels"], unused)
    except FileNotFoundError:
        pass
    except Exception as error:  # a damaged cache only makes the start slower
        log.warning("the cached index %s is damaged (%s); listing the folder again", store, error)
    return None


def _save(store: Path, stamp: str, listing: Listing) -> None:
    names, unused = np.frombuffer(listing.files, np.uint8), listing.unused.to_json()
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        with replacing(store) as temporary, open(temporary, "wb") as file:
            np.savez(file, stamp=stamp, files=names, ends=listing.ends, labels=listing.labels, unused=unused)
    except OSError as error:
        level = logging.DEBUG if only_readable(error) else logging.WARNING  # a finished run may be read-only
        log.log(level, "cannot cache the index in %s: %s", store, error)
