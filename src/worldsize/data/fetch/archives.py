"""Read archives: zip, and tar, uncompressed or compressed with gzip, xz or bzip2."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from worldsize.data.complete_tar import CompleteEntry
from worldsize.data.fetch.state import FOLDER
from worldsize.errors import DataError

_COMPRESSED: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.open(file)),
    b"\xfd7zXZ": lambda file: cast(IO[bytes], lzma.open(file)),
    b"BZh": lambda file: cast(IO[bytes], bz2.open(file)),
}
_ALWAYS_SKIPPED = ("/__MACOSX/", f"/{FOLDER}/")  # macOS metadata; our own state
_DISK_BLOCK = 4096


@dataclass(frozen=True)
class Member:
    """A file in an archive: its name, its size in bytes, and how to read it."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]


class Archive(Protocol):
    """An open archive. ``parallel``: members can be read concurrently; otherwise read each one before the next."""

    parallel: bool

    def members(self) -> Iterator[Member]:
        """All files, in the archive's order, under the names in the archive.

        Raises:
            DataError: an entry is neither a file nor a folder, or is encrypted.
        """
        ...


@dataclass(frozen=True)
class Contents:
    """Size of the selected part of an archive: files, bytes, and bytes on a disk that allocates full blocks.

    ``prefix`` is the enclosing folder, with a trailing ``/``, which is removed from all names; may be empty.
    """

    files: int
    bytes: int
    disk_bytes: int
    prefix: str


@contextmanager
def open_archive(path: Path, on_read: Callable[[int], object] = bool) -> Iterator[Archive]:
    """Open the archive at ``path``; ``on_read`` is called with the file position after each read.

    Raises:
        DataError: not an archive, or found to be damaged while it is open.
    """
    try:
        with _TrackedReader(path, on_read) as file:
            start = file.peek(8)
            if start.startswith(b"PK"):
                # A ZipFile does not close a file that it did not open itself, so its readers stay usable.
                yield _Zip(zipfile.ZipFile(file))
            else:
                opener = next((opener for magic, opener in _COMPRESSED.items() if start.startswith(magic)), None)
                yield _Tar(opener(file) if opener else file)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, error) from None
    except (NotImplementedError, UnicodeError) as error:
        raise DataError(f"{path} cannot be unpacked: {error}; repack it as .zip or .tar.gz") from None
    except OSError as error:
        if error.errno is None:  # gzip and bz2 raise OSError without errno for damaged data
            raise _damaged(path, error) from None
        raise


def scan(archive: Archive, unused: tuple[str, ...], roots: tuple[str, ...]) -> Contents:
    """Check every name before anything is written.

    Raises:
        DataError: a name points outside the folder or occurs twice, or the archive contains no files.
    """
    names: set[str] = set()
    top_folders: set[str] = set()
    total = disk_bytes = 0
    for member in selected(archive, unused):
        if member.name in names:
            raise DataError(f"the archive contains {member.name} twice; repack it without the duplicate")
        names.add(member.name)
        top_folders.add(member.name.partition("/")[0] if "/" in member.name else "")
        total += member.size
        disk_bytes += -(-member.size // _DISK_BLOCK) * _DISK_BLOCK
    if not names:
        raise DataError("the archive contains no files")
    prefix = top_folders.pop() if len(top_folders) == 1 else ""
    return Contents(len(names), total, disk_bytes, "" if prefix in ("", *roots) else f"{prefix}/")


def selected(archive: Archive, unused: tuple[str, ...], prefix: str = "") -> Iterator[Member]:
    """The members, except those whose names contain one of ``unused``; ``prefix`` is removed from the names."""
    for member in archive.members():
        name = _safe_name(member.name)
        if not any(part in f"/{name}" for part in (*_ALWAYS_SKIPPED, *unused)):
            yield Member(name[len(prefix) :], member.size, member.open)


class _Zip:
    parallel = True

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive

    def members(self) -> Iterator[Member]:
        for info in self._archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                continue
            if kind not in (0, stat.S_IFREG):
                raise _not_a_file(info.filename)
            if info.flag_bits & 1:
                raise DataError(f"{info.filename} is encrypted; repack the archive without a password")
            yield Member(info.filename, info.file_size, lambda info=info: self._archive.open(info))  # type: ignore[misc]


class _Tar:
    parallel = False

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def members(self) -> Iterator[Member]:
        self._stream.seek(0)
        archive = tarfile.open(fileobj=self._stream, mode="r:", tarinfo=CompleteEntry)
        while (info := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # tarfile would keep every entry: gigabytes for millions of files
            if info.isdir():
                continue
            if not info.isreg():
                raise _not_a_file(info.name)
            yield Member(info.name, info.size, lambda info=info: cast(IO[bytes], archive.extractfile(info)))  # type: ignore[misc]
        while self._stream.read(1 << 20):  # read to the end of the compressed stream to verify its checksum
            pass


class _TrackedReader(io.BufferedReader):
    """A file that reports its position after each read."""

    def __init__(self, path: Path, on_read: Callable[[int], object]) -> None:
        super().__init__(io.FileIO(path))
        self._on_read = on_read

    def read(self, amount: int | None = -1, /) -> bytes:
        data = super().read(amount)
        self._on_read(self.tell())
        return data


def _safe_name(name: str) -> str:
    """The normalized name, which must be inside the target folder."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise DataError(f"the archive contains {name!r}, which points outside the target folder; do not trust this archive")
    normalized = "/".join(part for part in parts if part not in ("", "."))
    if not normalized:
        raise DataError(f"the archive contains a file without a name ({name!r})")
    return normalized


def _not_a_file(name: str) -> DataError:
    return DataError(
        f"the archive contains {name}, a link or a device; only files and folders can be unpacked "
        "(to pack the targets of links, use tar --dereference --hard-dereference)"
    )


def _damaged(path: Path, error: Exception) -> DataError:
    reason = str(error) or type(error).__name__
    return DataError(f"{path} is damaged, or not a zip or tar file ({reason}); delete it and download it again")
