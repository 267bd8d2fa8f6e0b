"""What is in an archive: zip, or tar as it is or compressed by gzip, xz or bzip2."""

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
from typing import IO, TYPE_CHECKING, Protocol, cast

from worldsize.data.fetching.state import FOLDER
from worldsize.errors import DataError

if TYPE_CHECKING:
    from typing_extensions import Self

_COMPRESSED: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.open(file)),
    b"\xfd7zXZ": lambda file: cast(IO[bytes], lzma.open(file)),
    b"BZh": lambda file: cast(IO[bytes], bz2.open(file)),
}
_NEVER = ("/__MACOSX/", f"/{FOLDER}/")  # a Mac's notes; ours
_BLOCK = 4096


@dataclass(frozen=True)
class Member:
    """A file in an archive: its name, its size in bytes, and how to read it."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]


class Archive(Protocol):
    """An open archive. ``parallel``: several members can be read at once; else each before the next one is asked for."""

    parallel: bool

    def members(self) -> Iterator[Member]:
        """All files, in the archive's order, by the names that it has for them.

        Raises:
            DataError: something is neither file nor folder, or encrypted.
        """
        ...


@dataclass(frozen=True)
class Contents:
    """What of an archive is wanted: so many files, bytes, and bytes on a disk that gives whole blocks to files.

    ``around`` is the folder around all of it that is left out, with a ``/``; may be empty.
    """

    files: int
    bytes: int
    blocks: int
    around: str


@contextmanager
def reading(path: Path, seen: Callable[[int], object] = bool) -> Iterator[Archive]:
    """The archive in ``path``; ``seen`` gets the number of bytes whenever some were read.

    Raises:
        DataError: it is no archive, or turns out to be damaged while it is open.
    """
    try:
        with _Counted(path, seen) as file:
            start = file.peek(8)
            if start.startswith(b"PK"):
                # A file that it did not open itself is one that a ZipFile does not close behind its readers' backs.
                yield _Zip(zipfile.ZipFile(file))
            else:
                opener = next((opener for magic, opener in _COMPRESSED.items() if start.startswith(magic)), None)
                yield _Tar(opener(file) if opener else file)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, error) from None
    except (NotImplementedError, UnicodeError) as error:
        raise DataError(f"{path} cannot be unpacked: {error}; pack it anew as .zip or .tar.gz") from None
    except OSError as error:
        if error.errno is None:  # what gzip and bz2 raise
            raise _damaged(path, error) from None
        raise


def survey(archive: Archive, unused: tuple[str, ...], roots: tuple[str, ...]) -> Contents:
    """Look at every name before anything is written.

    Raises:
        DataError: a name points out of the folder or comes twice, or the archive holds no file.
    """
    names: set[str] = set()
    tops: set[str] = set()
    total = blocks = 0
    for member in wanted(archive, unused):
        if member.name in names:
            raise DataError(
                f"the archive holds {member.name} twice, and it cannot be known which one is meant: pack it anew"
            )
        names.add(member.name)
        tops.add(member.name.partition("/")[0] if "/" in member.name else "")
        total += member.size
        blocks += -(-member.size // _BLOCK) * _BLOCK
    if not names:
        raise DataError("the archive holds no files")
    around = tops.pop() if len(tops) == 1 else ""
    return Contents(len(names), total, blocks, "" if around in ("", *roots) else f"{around}/")


def wanted(archive: Archive, unused: tuple[str, ...], around: str = "") -> Iterator[Member]:
    """The members without those whose names hold one of ``unused``; names begin after the folder ``around`` them."""
    for member in archive.members():
        name = _inside(member.name)
        if not any(part in f"/{name}" for part in (*_NEVER, *unused)):
            yield Member(name[len(around) :], member.size, member.open)


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
                raise DataError(f"{info.filename} is encrypted: pack the archive anew without a password")
            yield Member(info.filename, info.file_size, lambda info=info: self._archive.open(info))  # type: ignore[misc]


class _Tar:
    parallel = False

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def members(self) -> Iterator[Member]:
        self._stream.seek(0)
        archive = tarfile.open(fileobj=self._stream, mode="r:", tarinfo=_Entry)
        while (info := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep them all: gigabytes for some millions
            if info.isdir():
                continue
            if not info.isreg():
                raise _not_a_file(info.name)
            yield Member(info.name, info.size, lambda info=info: cast(IO[bytes], archive.extractfile(info)))  # type: ignore[misc]
        while self._stream.read(1 << 20):  # to the end of the compressed stream, where its checksum is
            pass


class _Entry(tarfile.TarInfo):
    """An entry that is damaged or missing is an error: Python takes it for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the real end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"it ends early, or in the middle: {error}") from None


class _Counted(io.BufferedReader):
    """A file that tells how far it was read."""

    def __init__(self, path: Path, seen: Callable[[int], object]) -> None:
        super().__init__(io.FileIO(path))
        self._seen = seen

    def read(self, amount: int | None = -1, /) -> bytes:
        data = super().read(amount)
        self._seen(self.tell())
        return data


def _inside(name: str) -> str:
    """The name without ``./`` and the like, which must lie below the folder that it is unpacked into."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise DataError(f"the archive holds {name!r}, which points out of the folder it is unpacked into: do not trust it")
    plain = "/".join(part for part in parts if part not in ("", "."))
    if not plain:
        raise DataError(f"the archive holds a file without a name ({name!r})")
    return plain


def _not_a_file(name: str) -> DataError:
    return DataError(
        f"the archive holds {name}, a link or a device: only files and folders are unpacked "
        "(tar packs what links point to with --dereference --hard-dereference)"
    )


def _damaged(path: Path, error: Exception) -> DataError:
    reason = str(error) or type(error).__name__
    return DataError(f"{path} is damaged or no zip or tar file ({reason}): remove it and get it anew")
