"""``worldsize data fetch``: a data set, from its source to a folder that a recipe can train on.

Every step leaves what it has done where the next call finds it: the command can be stopped at any time, in any way, and
the same command goes on. A second one after the end does nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import tyro

from worldsize.data import open_dataset
from worldsize.data.fetching import Interrupted, download, kaggle
from worldsize.data.fetching.archives import Contents, reading, survey, wanted
from worldsize.data.fetching.known import KAGGLE, KNOWN, Counts, Known, Name
from worldsize.data.fetching.progress import Meter, size
from worldsize.data.fetching.state import State, Verified, begin, locked
from worldsize.data.fetching.unpack import present, unpack
from worldsize.errors import DataError, UserError
from worldsize.recipe import Data
from worldsize.signals import ends_at_once


@dataclass
class Fetch:
    """Download a data set, verify it, and lay it out so that `--data.root` may name its folder.

    Whatever interrupts this, the same command goes on where it was. Run again after the end, it does nothing.
    """

    dataset: tyro.conf.Positional[Name]
    """What to fetch: `imagenet` comes from Kaggle, `cifar10` from its authors, `folder` is any pictures in an archive."""
    to: Path
    """The folder that is filled: a new one."""
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Another source of the archive (.zip, .tar, .tar.gz): a file, a URL (https, s3, gs, ...), or kaggle:COMPETITION."""
    sha256: str | None = None
    """Checksum of the archive."""
    keep_archive: bool = False
    """Do not remove the downloaded archive at the end."""
    subset: bool = False
    """The archive holds a part of the data set: do not insist on its known number of pictures."""


def run(asked: Fetch) -> int:
    """Fetch what is asked for and print what is there then. Returns the exit code, 0.

    A signal ends the process with the exit code of `Stopped`.

    Raises:
        UserError: no source, no room, no permission, the source refuses, the folder is in other use.
        DataError: the archive is damaged, or holds not what the data set should be.
        Interrupted: the source does not answer, or another fetch is at work.
    """
    known = KNOWN[asked.dataset]
    source = _source(asked, known)
    root = asked.to.expanduser().absolute()
    with _explained(root), ends_at_once("the same command goes on from here", kaggle.stop), locked(root) as lock:
        state = begin(root, asked.dataset, download.shown(source))
        if state.verified is None:
            archive = _local(source, state) or _downloaded(source, known, state, lock)
            archive = _checked(archive, _checksum(asked, known, source), state)
            _unpacked(archive, known, state)
            state.verified = _verified(asked, known, state)
            state.save()
        if not asked.keep_archive:
            state.archive.unlink(missing_ok=True)
        print(summary(state, state.verified), end="")
    return 0


def summary(state: State, found: Verified) -> str:
    """What is in the folder, for people."""
    rows = {
        "classes": f"{found.counts.classes:,}",
        "training": f"{found.counts.train:,} pictures",
        "validation": f"{found.counts.val:,} pictures",
        "on disk": f"{found.files:,} files, {size(found.bytes)}",
    }
    lines = [f"  {name:<11} {value}\n" for name, value in rows.items()]
    return f"{state.dataset} is in {state.root}: train with --data.root {state.root}\n" + "".join(lines)


# The steps -----------------------------------------------------------------------------------------------------------


def _source(asked: Fetch, known: Known) -> str:
    source = asked.source or known.source
    if source is None:
        raise UserError("where is it? name an archive of the pictures with --from: a file or a URL")
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise UserError(f"--from {source} is not an address: {error}") from None
    if parts.password:
        raise UserError("--from: an address with a password in it would be seen by everybody: leave the password out")
    if source == KAGGLE:
        raise UserError("--from kaggle: names no competition: write kaggle:COMPETITION")
    return source if parts.scheme else str(Path(source).expanduser().absolute())


def _checksum(asked: Fetch, known: Known, source: str) -> str | None:
    if asked.sha256 is not None:
        return f"sha256:{asked.sha256.lower()}"
    return known.checksum if source == known.source else None


def _local(source: str, state: State) -> Path | None:
    """The archive, where it is on this machine already: it is neither copied nor removed."""
    parts = urlsplit(source)
    if parts.scheme not in ("", "file"):
        return None
    path = Path(parts.path if parts.scheme else source)
    if not path.is_file():
        raise UserError(f"--from {path}: there is no such file")
    now = (path.stat().st_size, str(path.stat().st_mtime_ns))
    if (state.size, state.validator) != now:
        state.size, state.validator, state.checked, state.unpacked = *now, "", 0
    return path


def _downloaded(source: str, known: Known, state: State, lock: int) -> Path:
    if state.archive.exists():
        return state.archive
    if state.size is not None and download.length(state.part) == state.size:
        return state.part

    # What is known of the data set's own archive says nothing of another one.
    archive_bytes, unpacked_bytes = (known.archive_bytes, known.unpacked_bytes) if source == known.source else (0, 0)

    def fits(missing: int) -> None:
        _require(state.root, missing, unpacked_bytes or state.size or missing)

    with Meter("downloading") as meter:
        if source.startswith(KAGGLE):
            competition = source.removeprefix(KAGGLE)
            fits(max(archive_bytes - download.length(kaggle.archive_in(state.folder, competition)), 0))
            _from_kaggle(competition, state, lock, meter)
        else:
            web = urlsplit(source).scheme in ("http", "https")
            download.download((download.from_web if web else download.from_store)(source), state, fits, meter)
    return state.part


def _from_kaggle(competition: str, state: State, lock: int, meter: Meter) -> None:
    archive = kaggle.download(competition, state.folder, lock, meter)
    state.size, state.checked, state.unpacked = download.length(archive), "", 0
    state.save()
    os.replace(archive, state.part)


def _checked(archive: Path, expected: str | None, state: State) -> Path:
    """The archive, with the right checksum and under its final name."""
    if expected is not None and state.checked != expected:
        with Meter("comparing checksums", download.length(archive)) as meter:
            download.check(archive, expected, meter)
        state.checked = expected
        state.save()
    if archive == state.part:
        os.replace(archive, state.archive)
        return state.archive
    return archive


def _unpacked(archive: Path, known: Known, state: State) -> None:
    """Everything that is wanted of the archive in its place."""
    state.save()

    def note(done: int) -> None:
        state.unpacked = done
        state.save()

    contents = _surveyed(archive, known)
    whole = (contents.files, contents.bytes)
    _require(state.root, 0, contents.blocks - present(state.root)[1])
    for _ in range(2):
        with Meter("unpacking", contents.bytes) as meter, reading(archive) as opened:
            unpack(opened, wanted(opened, known.unused, contents.around), state.root, state.unpacked, note, meter)
        if present(state.root) == whole:
            return
        note(0)  # the machine went down before all that was noted had reached the disk
    files, total = present(state.root)
    raise DataError(
        f"{state.root} has {files:,} files with {total:,} bytes, but the archive holds {whole[0]:,} with {whole[1]:,}: "
        "remove what is not from it, and run the same command again"
    )


def _surveyed(archive: Path, known: Known) -> Contents:
    with Meter("looking through the archive", download.length(archive)) as meter, reading(archive, meter.at) as opened:
        return survey(opened, known.unused, known.roots)


def _verified(asked: Fetch, known: Known, state: State) -> Verified:
    """What a recipe will find in the folder; that is what counts."""
    files, total = present(state.root)
    try:
        with tempfile.TemporaryDirectory() as cache:
            dataset = open_dataset(Data(name=asked.dataset, root=state.root), Path(cache))
    except UserError as error:
        raise DataError(f"the archive does not hold what {asked.dataset} should be: {error}") from None
    found = Counts(len(dataset.train.classes), len(dataset.train), len(dataset.val))
    if known.counts not in (None, found) and not asked.subset:
        raise DataError(
            f"{asked.dataset} should have {known.counts}, but {state.root} has {found}: the source is not whole. "
            "Fetch from another one into a new folder, or say --subset if a part is meant"
        )
    return Verified(found, files, total)


def _require(root: Path, archive: int, unpacked: int) -> None:
    free = shutil.disk_usage(root).free
    if free < archive + unpacked:
        raise UserError(
            f"{root} has {size(free)} free, but {size(archive + unpacked)} are needed "
            f"({size(archive)} still to download, {size(unpacked)} to unpack): free some, or take a larger volume"
        )


# Around the steps ----------------------------------------------------------------------------------------------------


@contextmanager
def _explained(root: Path) -> Iterator[None]:
    """What the operating system says, in the user's terms."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk of {root} is full: free some, and run the same command again; it goes on") from None
        if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
            raise Interrupted(f"{where}: {error.strerror}; when the disk is well again, the same command goes on") from None
        raise UserError(f"{where}: {error.strerror or error}") from None
