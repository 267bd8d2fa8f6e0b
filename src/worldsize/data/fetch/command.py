"""``worldsize data fetch``: download a dataset into a folder that a recipe can train on.

Every step records its progress: the command can be stopped or killed at any time, and the same command resumes. Running
it again after completion only compares the checksum.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import tyro

from worldsize.config.recipe import Data
from worldsize.data import open_dataset
from worldsize.data.fetch import Interrupted, checksums, download, kaggle
from worldsize.data.fetch.archives import Contents, open_archive, scan, selected
from worldsize.data.fetch.known import KAGGLE, KNOWN, Counts, Known, Name
from worldsize.data.fetch.state import FetchState, Verified, load_or_create, locked
from worldsize.data.fetch.unpack import count_files, unpack
from worldsize.data.progress_bar import ByteProgress, size
from worldsize.distributed.stop_signals import ends_at_once, temporary_folder
from worldsize.errors import DataError, UserError


@dataclass
class Fetch:
    """Download and verify a dataset, and lay it out in a folder for `--data.root`.

    If interrupted, rerun the same command to resume. Running it again after completion only compares --sha256, if given.
    """

    dataset: tyro.conf.Positional[Name]
    """Dataset: `imagenet` (from Kaggle), `cifar10` (from its authors), or `folder` (any archive of images)."""
    to: Path
    """Destination folder: new, empty, or from an interrupted fetch of the same dataset."""
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Alternative source of the archive (.zip, .tar, .tar.gz): a file, a URL (https, s3, gs, ...), or kaggle:COMPETITION."""
    sha256: str | None = None
    """Expected SHA-256 of the archive."""
    keep_archive: bool = False
    """Keep the downloaded archive."""
    subset: bool = False
    """The archive contains a subset of the dataset: skip the check of the number of images."""


def run(options: Fetch) -> int:
    """Fetch the dataset and print a summary. Returns the exit code, 0.

    A signal ends the process with the exit code of `Stopped`.

    Raises:
        UserError: no source, no space, no permission, the source rejects the request, or the folder contains other files.
        DataError: the archive is damaged, or does not contain the expected dataset.
        Interrupted: the source does not respond, or another fetch is running.
    """
    known = KNOWN[options.dataset]
    source = _source(options, known)
    expected = checksums.expected(options.sha256, known.checksum if source == known.source else None)
    root = options.to.expanduser().absolute()
    with (
        _os_errors_explained(root),
        ends_at_once("rerun the same command to resume", kaggle.stop, True),
        locked(root) as lock,
    ):
        state = load_or_create(root, options.dataset, download.redacted(source))
        if state.verified is None:
            archive = _local(source, state) or _downloaded(source, known, state, lock)
            archive = _checksum_verified(archive, expected, state)
            _unpacked(archive, known, state)
            state.verified = _verified(options, known, state)
            state.save()
        elif options.sha256 is not None:
            checksums.compare(options.sha256, state)
        if not options.keep_archive:
            state.archive.unlink(missing_ok=True)
        print(summary(state, state.verified), end="")
    return 0


def summary(state: FetchState, verified: Verified) -> str:
    """Human-readable contents of the folder."""
    rows = {
        "classes": f"{verified.counts.classes:,}",
        "training": f"{verified.counts.train:,} images",
        "validation": f"{verified.counts.val:,} images",
        "on disk": f"{verified.files:,} files, {size(verified.bytes)}",
    }
    lines = [f"  {name:<11} {value}\n" for name, value in rows.items()]
    return f"{state.dataset} is in {state.root}: train with --data.root {state.root}\n" + "".join(lines)


# Steps ---------------------------------------------------------------------------------------------------------------


def _source(options: Fetch, known: Known) -> str:
    source = options.source or known.source
    if source is None:
        raise UserError("--from is required: pass an archive of the images, as a file or a URL")
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise UserError(f"--from {source} is not a valid URL: {error}") from None
    if parts.password:
        raise UserError("--from: the URL contains a password, which other users could see; remove it")
    if source == KAGGLE:
        raise UserError("--from kaggle: the competition is missing; use kaggle:COMPETITION")
    return source if parts.scheme else str(Path(source).expanduser().absolute())


def _local(source: str, state: FetchState) -> Path | None:
    """The archive, if it is a local file; it is neither copied nor deleted."""
    parts = urlsplit(source)
    if parts.scheme not in ("", "file"):
        return None
    path = Path(unquote(parts.path) if parts.scheme else source)
    if not path.is_file():
        raise UserError(f"--from {path}: no such file")
    current = (path.stat().st_size, str(path.stat().st_mtime_ns))
    if (state.size, state.validator) != current:
        state.size, state.validator, state.checked, state.unpacked = *current, "", 0
    return path


def _downloaded(source: str, known: Known, state: FetchState, lock: int) -> Path:
    if state.archive.exists():
        return state.archive
    if state.size is not None and download.length(state.part) == state.size:
        return state.part

    # The known sizes apply only to the dataset's default source.
    archive_bytes, unpacked_bytes = (known.archive_bytes, known.unpacked_bytes) if source == known.source else (0, 0)

    def require_space(missing: int) -> None:
        _require_space(state.root, missing, unpacked_bytes or state.size or missing)

    with ByteProgress("downloading") as meter:
        if source.startswith(KAGGLE):
            competition = source.removeprefix(KAGGLE)
            require_space(max(archive_bytes - download.length(kaggle.archive_in(state.folder, competition)), 0))
            _from_kaggle(competition, state, lock, meter)
        else:
            web = urlsplit(source).scheme in ("http", "https")
            download.download((download.from_web if web else download.from_store)(source), state, require_space, meter)
    return state.part


def _from_kaggle(competition: str, state: FetchState, lock: int, meter: ByteProgress) -> None:
    archive = kaggle.download(competition, state.folder, lock, meter)
    state.size, state.checked, state.unpacked = download.length(archive), "", 0
    state.save()
    os.replace(archive, state.part)


def _checksum_verified(archive: Path, expected: str | None, state: FetchState) -> Path:
    """The archive, with its checksum verified and under its final name."""
    if expected is not None and state.checked != expected:
        with ByteProgress("verifying the checksum", download.length(archive)) as meter:
            download.verify_checksum(archive, expected, meter)
        state.checked = expected
        state.save()
    if archive == state.part:
        os.replace(archive, state.archive)
        return state.archive
    return archive


def _unpacked(archive: Path, known: Known, state: FetchState) -> None:
    """Unpack the selected files of the archive into place."""
    state.save()

    def save_progress(done: int) -> None:
        state.unpacked = done
        state.save()

    contents = _scanned(archive, known)
    expected = (contents.files, contents.bytes)
    _require_space(state.root, 0, contents.disk_bytes - count_files(state.root)[1])
    for _ in range(2):
        with ByteProgress("unpacking", contents.bytes) as meter, open_archive(archive) as opened:
            unpack(opened, selected(opened, known.unused, contents.prefix), state.root, state.unpacked, save_progress, meter)
        if count_files(state.root) == expected:
            return
        save_progress(0)  # a machine crash lost files that were recorded as written
    files, total = count_files(state.root)
    raise DataError(
        f"{state.root} has {files:,} files with {total:,} bytes, but the archive has {expected[0]:,} with {expected[1]:,}: "
        "delete files that are not from the archive, and rerun this command"
    )


def _scanned(archive: Path, known: Known) -> Contents:
    with (
        ByteProgress("scanning the archive", download.length(archive)) as meter,
        open_archive(archive, meter.at) as opened,
    ):
        return scan(opened, known.unused, known.roots)


def _verified(options: Fetch, known: Known, state: FetchState) -> Verified:
    """Open the folder as a recipe does and verify the number of images."""
    files, total = count_files(state.root)
    try:
        with temporary_folder() as cache:
            dataset = open_dataset(Data(name=options.dataset, root=state.root), cache)
    except UserError as error:
        raise DataError(f"the archive does not contain the expected {options.dataset} dataset: {error}") from None
    counts = Counts(len(dataset.train.classes), len(dataset.train), len(dataset.val))
    if known.counts not in (None, counts) and not options.subset:
        raise DataError(
            f"{options.dataset} should have {known.counts}, but {state.root} has {counts}: the source is incomplete. "
            "Fetch from another source into a new folder, or pass --subset to accept a subset"
        )
    return Verified(counts, files, total)


def _require_space(root: Path, archive: int, unpacked: int) -> None:
    free = shutil.disk_usage(root).free
    if free < archive + unpacked:
        raise UserError(
            f"not enough space in {root}: {size(free)} free, {size(archive + unpacked)} needed "
            f"({size(archive)} to download, {size(unpacked)} to unpack); free space or use a larger volume"
        )


# Errors --------------------------------------------------------------------------------------------------------------


@contextmanager
def _os_errors_explained(root: Path) -> Iterator[None]:
    """Convert OSError to an error with a remedy."""
    try:
        yield
    except OSError as error:
        path = error.filename or root
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk of {root} is full; free space and rerun this command to resume") from None
        if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
            raise Interrupted(f"{path}: {error.strerror}; once the disk recovers, rerun this command to resume") from None
        raise UserError(f"{path}: {error.strerror or error}") from None
