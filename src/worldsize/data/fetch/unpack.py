"""Unpack an archive so that every file in place is complete."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from worldsize.data.fetch.archives import Archive, Member
from worldsize.data.fetch.state import FOLDER
from worldsize.data.progress_bar import ByteProgress
from worldsize.errors import DataError

# On a network disk each small file costs a few round trips, so many are written concurrently.
_THREADS = 16
# Files per progress record; an interrupted call repeats at most this many.
BATCH = 256
_CHUNK = 1 << 20


def unpack(
    archive: Archive,
    members: Iterator[Member],
    root: Path,
    start: int,
    save_progress: Callable[[int], object],
    meter: ByteProgress,
) -> None:
    """Write ``members`` into ``root``, skipping the first ``start``, which an earlier call has written.

    ``save_progress`` is called with the number of members in place after every `BATCH`.

    Raises:
        DataError: the size of a member differs from the size that the archive declares.
    """
    scratch = root / FOLDER / "unpacking"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    meter.start_at(sum(member.size for member in islice(members, start)))

    def write(member: Member) -> None:
        _write(member, root, scratch / str(threading.get_ident()), meter)

    with ThreadPoolExecutor(_THREADS) as pool:
        # A tar member must be read before the iterator advances, which the lazy built-in map guarantees.
        map_members = pool.map if archive.parallel else map
        while count := sum(1 for _ in map_members(write, islice(members, BATCH))):
            start += count
            save_progress(start)
    shutil.rmtree(scratch)


def count_files(root: Path) -> tuple[int, int]:
    """Number of files in ``root`` and their bytes, excluding the state of the fetch."""
    files = total = 0
    folders = [str(root)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != FOLDER:
                        folders.append(entry.path)
                else:
                    files += 1
                    total += entry.stat(follow_symlinks=False).st_size
    return files, total


def _write(member: Member, root: Path, temporary: Path, meter: ByteProgress) -> None:
    written = 0
    with member.open() as source, open(temporary, "wb") as out:
        while chunk := source.read(_CHUNK):
            out.write(chunk)
            written += len(chunk)
            meter.add(len(chunk))
    if written != member.size:
        raise DataError(f"the archive is damaged: {member.name} has {written:,} bytes instead of {member.size:,}")
    target = root / member.name
    try:
        os.replace(temporary, target)
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, target)
