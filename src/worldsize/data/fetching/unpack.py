"""Putting the files of an archive in place, so that every file that is there is whole."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from worldsize.data.fetching.archives import Archive, Member
from worldsize.data.fetching.progress import Meter
from worldsize.data.fetching.state import FOLDER
from worldsize.errors import DataError

# On a network disk a small file costs a few round trips, and many can be under way.
_THREADS = 16
# After each so many files what is done is noted; an interrupted call repeats no more than these.
BATCH = 256
_CHUNK = 1 << 20


def unpack(
    archive: Archive, members: Iterator[Member], root: Path, start: int, note: Callable[[int], object], meter: Meter
) -> None:
    """Write ``members`` into ``root``, without the first ``start``, which an earlier call has written.

    ``note`` gets the number of members in place, now and then.

    Raises:
        DataError: a member is not as long as the archive says.
    """
    scratch = root / FOLDER / "unpacking"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    meter.start_at(sum(member.size for member in islice(members, start)))

    def write(member: Member) -> None:
        _write(member, root, scratch / str(threading.get_ident()), meter)

    with ThreadPoolExecutor(_THREADS) as pool:
        # Both take members only as far as they must: those of a tar file have to be read in passing.
        each = pool.map if archive.parallel else map
        while count := sum(1 for _ in each(write, islice(members, BATCH))):
            start += count
            note(start)
    shutil.rmtree(scratch)


def present(root: Path) -> tuple[int, int]:
    """The number of files in ``root`` and their bytes, without those of the fetch itself."""
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


def _write(member: Member, root: Path, temporary: Path, meter: Meter) -> None:
    written = 0
    with member.open() as source, open(temporary, "wb") as out:
        while chunk := source.read(_CHUNK):
            out.write(chunk)
            written += len(chunk)
            meter.add(len(chunk))
    if written != member.size:
        raise DataError(
            f"{member.name} has {written:,} bytes in the archive instead of {member.size:,}: the archive is damaged"
        )
    target = root / member.name
    try:
        os.replace(temporary, target)
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary, target)
