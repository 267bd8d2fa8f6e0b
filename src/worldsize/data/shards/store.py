"""Where shards are read from: files of this machine, or anything that fsspec reaches."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crc32c

from worldsize.data import native
from worldsize.data.stores import faults_as_oserror
from worldsize.errors import StoreUnreachable, UserError

log = logging.getLogger(__name__)

Bytes = bytes | memoryview
Piece = tuple[str, int, int]  # the file's name, offset, length
Checked = tuple[Bytes, int]  # with their CRC-32C
_MOST_FILES = 32_000
_PAUSES_S = (1, 2, 4, 8, 8)  # stopping a run may have to wait for them


class Store(ABC):
    """The files of one folder. Everything may be called from many threads.

    Raises:
        OSError: by every method but `several`: the file is not there, or may not or cannot be read.
        StoreUnreachable: by every method but `peek`: the store does not answer.

    Attributes:
        where: the folder, as the user named it.
    """

    where: str

    @property
    def together(self) -> bool:
        """Whether `several` costs hardly more than one; else it reads one after the other."""
        return False

    @abstractmethod
    def whole(self, name: str) -> Bytes:
        """All of the file; where it is mapped, only what is touched takes memory."""

    @abstractmethod
    def look(self, name: str, length: int) -> tuple[int, bytes]:
        """How many bytes a file has, and the first ``length``, where it may never be read further."""

    @abstractmethod
    def read(self, name: str, offset: int, length: int) -> Bytes:
        """These bytes of the file, fewer where it ends before."""

    def several(self, pieces: Sequence[Piece]) -> list[Checked | OSError]:
        """What `read` gives of each, with its CRC-32C, or raises: one that cannot be read does not keep back the others."""
        return [_read_or_why(self, piece) for piece in pieces]

    def peek(self, name: str, offset: int, length: int) -> Bytes:
        """The same, for a message that can do without them: a store that does not answer is not waited for."""
        return self.read(name, offset, length)


class Local(Store):
    """Files of this machine: an index is mapped, of shards what is wanted is read.

    Not mapped as well, for where a mapped file cannot be read any more (somebody has cut it off, a disk across the network
    fails) a signal ends the process, and no error says why.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._most = _most_files()

    def __reduce__(self) -> tuple[Any, ...]:
        return Local, (self._folder,)

    def whole(self, name: str) -> memoryview:
        return _mapped(self._folder / name)

    def look(self, name: str, length: int) -> tuple[int, bytes]:
        # Without the comfort of file objects: there may be 50,000.
        descriptor = os.open(f"{self.where}/{name}", os.O_RDONLY)
        try:
            return os.fstat(descriptor).st_size, os.read(descriptor, length)
        finally:
            os.close(descriptor)

    @property
    def together(self) -> bool:
        return native.load() is not None

    def several(self, pieces: Sequence[Piece]) -> list[Checked | OSError]:
        library = native.load()
        if library is None:
            return super().several(pieces)
        # Each of many threads holds that many files open, beside those that are kept.
        groups = _in_few_files(pieces, max(1, self._most // 128))
        return [found for group in groups for found in self._natively(library, group)]

    def _natively(self, library: native.Native, pieces: Sequence[Piece]) -> list[Checked | OSError]:
        names, offsets, lengths = zip(*pieces, strict=True)
        try:
            files = {name: self._open(name) for name in set(names)}
        except OSError:  # then each tells for itself
            return super().several(pieces)
        return [*library.read([files[name].descriptor for name in names], offsets, lengths)]

    def read(self, name: str, offset: int, length: int) -> bytes:
        file = self._open(name)
        data = os.pread(file.descriptor, length, offset)
        # One call gives no more than 2 GB, and some file systems less.
        while len(data) < length and (more := os.pread(file.descriptor, length - len(data), offset + len(data))):
            data += more
        return data

    def _open(self, name: str) -> _File:
        with self._lock:
            file = self._files.get(name)
            if file is not None:
                self._files.move_to_end(name)
                return file
        file = _File(f"{self.where}/{name}")
        with self._lock:
            self._files[name] = file
            if len(self._files) > self._most:
                self._files.popitem(last=False)
        return file


class _File:
    """An open file, until nobody reads from it any more: others may take its place meanwhile."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class Remote(Store):
    """Files at a URL (``s3://BUCKET/FOLDER``, ``gs://``, ``https://``, ...), one request for each read.

    A read that fails is tried again for a while: who reads is in the middle of a long run. What is lost then is the run's
    start, not a picture: to put others in the place of those that cannot be had would change its numbers.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.where = url
        try:
            with faults_as_oserror():
                self._files, self._folder = url_to_fs(url)
        except OSError as error:
            raise StoreUnreachable(f"{url}: {error}") from None
        except (ImportError, ValueError) as error:  # fsspec says which package is missing, or that it knows no such kind
            raise UserError(f"{url}: {error}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, (self.where,)

    def whole(self, name: str) -> bytes:
        with self._reachable(name):
            return bytes(self._files.cat_file(self._path(name)))

    def look(self, name: str, length: int) -> tuple[int, bytes]:
        with self._reachable(name):
            return int(self._files.size(self._path(name))), self.peek(name, 0, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        for pause in _PAUSES_S:
            try:
                return self.peek(name, offset, length)
            except FileNotFoundError:
                raise
            except PermissionError as error:
                raise UserError(f"{self.where}/{name} may not be read any more: {error}") from error
            except OSError as error:
                log.warning("%s/%s cannot be read (%s); trying again in %d s", self.where, name, error, pause)
                time.sleep(pause)
        with self._reachable(name):
            return self.peek(name, offset, length)

    def peek(self, name: str, offset: int, length: int) -> bytes:
        with faults_as_oserror():
            return bytes(self._files.cat_file(self._path(name), start=offset, end=offset + length))

    @contextmanager
    def _reachable(self, name: str) -> Iterator[None]:
        try:
            with faults_as_oserror():
                yield
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            raise StoreUnreachable(f"{self.where}/{name} cannot be read: {error}") from error
        except (ImportError, ValueError) as error:  # such as an endpoint that is no URL
            raise UserError(f"{self.where}/{name}: {error}") from None

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"


def _in_few_files(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """The pieces in runs, each of at most so many files."""
    run: list[Piece] = []
    names: set[str] = set()
    for piece in pieces:
        if piece[0] not in names and len(names) == most:
            yield run
            run, names = [], set()
        run.append(piece)
        names.add(piece[0])
    if run:
        yield run


def _read_or_why(store: Store, piece: Piece) -> Checked | OSError:
    try:
        data = store.read(*piece)
        return data, crc32c.crc32c(data)
    except OSError as error:
        return error


def _mapped(path: Path) -> memoryview:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _most_files() -> int:
    """How many shards are kept open: half of what the system allows to one process."""
    import resource  # not on every system

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_FILES if soft == resource.RLIM_INFINITY else min(max(soft // 2, 16), _MOST_FILES)
