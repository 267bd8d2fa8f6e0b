"""Where shards are read from: local files, or any storage that fsspec supports."""

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
import numpy as np
from numpy.typing import NDArray

from worldsize.data import read_errors
from worldsize.data.images import native
from worldsize.data.remote import faults_as_oserror, file_system
from worldsize.errors import Forbidden, ReadFailed, StoreUnreachable, UserError, of_the_place
from worldsize.watchdog import heartbeat

log = logging.getLogger(__name__)

Bytes = bytes | memoryview
Piece = tuple[str, int, int]  # file name, offset, length
Checked = tuple[Bytes, int]  # and their CRC-32C
_MAX_FILES = 32_000
# Without O_NONBLOCK, opening a FIFO blocks until there is a writer; with it, reading one is an error.
_READ = os.O_RDONLY | os.O_NONBLOCK


class Store(ABC):
    """The files of one folder. All methods are thread-safe.

    Raises:
        OSError: by every method except `several`: the file does not exist or is no file.
        StoreUnreachable: by every method except `peek`: the store or the disk does not respond.
        UserError: by every method except `peek`: there is no permission.

    Attributes:
        where: the folder or URL, as the user gave it.
    """

    where: str

    @property
    def reads_many(self) -> bool:
        """Whether `several` reads many pieces in one call; otherwise it calls `read` for each."""
        return False

    @abstractmethod
    def read_all(self, name: str) -> Bytes:
        """The complete file. It may be memory-mapped, so that only the accessed pages use memory."""

    @abstractmethod
    def look(self, name: str, length: int) -> tuple[int, bytes]:
        """The size of a file and its first ``length`` bytes. Does not keep the file open."""

    @abstractmethod
    def read(self, name: str, offset: int, length: int) -> Bytes:
        """``length`` bytes of the file from ``offset``, fewer at its end."""

    def several(self, pieces: Sequence[Piece]) -> list[Checked | OSError]:
        """`read` each piece: its bytes and their CRC-32C, or the error. A failed piece does not affect the others."""
        return [_read_or_error(self, piece) for piece in pieces]

    def rows(
        self, names: Sequence[str], which: NDArray[np.int64], offsets: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint32]] | None:
        """Pieces of one length in one call, with few operations of Python: small images take longer in Python than to read.

        Args:
            names: distinct files.
            which: (n,), the place in ``names`` of each piece's file.
            offsets: (n,), where the pieces start, bytes.

        Returns:
            Their bytes (n, length), and the CRC-32C of each. None if this store cannot, or if not all of them could be
            read: `several` can, or tells why not.
        """
        return None

    def peek(self, name: str, offset: int, length: int) -> Bytes:
        """Like `read`, but without retries; for messages, which can do without the bytes."""
        return self.read(name, offset, length)


class Local(Store):
    """Local files. The index is memory-mapped; shards are read with pread.

    Shards are not mapped: if a mapped file is truncated or its network storage fails, an access raises SIGBUS, which kills
    the process, instead of an error.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._max_open = _max_files()
        self._patience = read_errors.Patience()

    def __reduce__(self) -> tuple[Any, ...]:
        return Local, (self._folder,)

    def read_all(self, name: str) -> memoryview:
        with _reachable(self._folder / name):
            return _map(self._folder / name)

    def look(self, name: str, length: int) -> tuple[int, bytes]:
        with _reachable(self._folder / name):
            return self._look(name, length)

    def _look(self, name: str, length: int) -> tuple[int, bytes]:
        # os.open is faster than a file object; there may be 50,000 files.
        descriptor = os.open(f"{self.where}/{name}", _READ)
        try:
            return os.fstat(descriptor).st_size, os.read(descriptor, length)
        finally:
            os.close(descriptor)

    @property
    def reads_many(self) -> bool:
        return native.load() is not None

    def several(self, pieces: Sequence[Piece]) -> list[Checked | OSError]:
        library = native.load()
        if library is None:
            return super().several(pieces)
        groups = _group_by_files(pieces, self._group)
        return [found for group in groups for found in self._read_natively(library, group)]

    @property
    def _group(self) -> int:
        """Files to read from at once: each of many threads holds that many open, in addition to the cached ones."""
        return max(1, self._max_open // 128)

    def rows(
        self, names: Sequence[str], which: NDArray[np.int64], offsets: NDArray[np.int64], length: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint32]] | None:
        library = native.load()
        if library is None or len(names) > self._group:
            return None
        try:
            files = [self._open(name) for name in names]
        except OSError:
            return None
        descriptors = np.array([file.descriptor for file in files])
        with heartbeat.reading(str(self._folder / names[0])):
            data, got, checksums = library.read_together(descriptors[which], offsets, np.full(len(which), length))
        data.setflags(write=False)
        return (data.reshape(-1, length), checksums) if (got == length).all() else None

    def _read_natively(self, library: native.Native, pieces: Sequence[Piece]) -> list[Checked | OSError]:
        names, offsets, lengths = zip(*pieces, strict=True)
        try:
            files = {name: self._open(name) for name in set(names)}
        except OSError:  # read one by one, so that each piece gets its own error
            return super().several(pieces)
        with heartbeat.reading(str(self._folder / names[0])):
            found = library.read([files[name].descriptor for name in names], offsets, lengths)
        failed = any(isinstance(one, OSError) for one in found)
        return super().several(pieces) if failed else [*found]

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self._patience.read(self._folder / name, lambda: self._fresh(name, offset, length))

    def _fresh(self, name: str, offset: int, length: int) -> bytes:
        """`peek`; after an error, the file is opened again: a handle stays stale."""
        try:
            return self.peek(name, offset, length)
        except OSError:
            with self._lock:
                self._files.pop(name, None)
            raise

    def peek(self, name: str, offset: int, length: int) -> bytes:
        file = self._open(name)
        data = os.pread(file.descriptor, length, offset)
        # One call returns at most 2 GB, on some file systems less.
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
            if len(self._files) > self._max_open:
                self._files.popitem(last=False)
        return file


class _File:
    """An open file. Closed when the last reader is done with it, even if it has already been evicted from the cache."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, _READ)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class Remote(Store):
    """Files at a URL (``s3://BUCKET/FOLDER``, ``gs://``, ``https://``, ...), one request per read.

    Failed reads are retried for some time, because they occur in the middle of long runs. If they still fail, the run stops.
    Unreachable images are not treated as broken ones: replacing them by others would change the run's results.
    """

    def __init__(self, url: str) -> None:
        self.where = url
        try:
            self._files, self._folder = file_system(url)
        except OSError as error:
            raise StoreUnreachable(f"{url}: {error}") from None
        except (ImportError, ValueError) as error:  # fsspec names the missing package or the unknown protocol
            raise UserError(f"{url}: {error}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, (self.where,)

    def read_all(self, name: str) -> bytes:
        with self._reachable(name):
            return bytes(self._files.cat_file(self._path(name)))

    def look(self, name: str, length: int) -> tuple[int, bytes]:
        with self._reachable(name):
            return int(self._files.size(self._path(name))), self.peek(name, 0, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        for delay in read_errors.RETRY_DELAYS_S:
            try:
                with heartbeat.reading(f"{self.where}/{name}"):
                    return self.peek(name, offset, length)
            except FileNotFoundError:
                raise
            except PermissionError as error:
                raise Forbidden(
                    f"{self.where}/{name}: access denied, check the credentials and permissions: {error}"
                ) from error
            except OSError as error:
                log.warning("%s/%s cannot be read (%s); retrying in %d s", self.where, name, error, delay)
                time.sleep(delay)
        try:
            with self._reachable(name):
                return self.peek(name, offset, length)
        except StoreUnreachable as error:
            raise ReadFailed(str(error)) from error

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
        except (ImportError, ValueError) as error:  # for example an invalid endpoint URL
            raise UserError(f"{self.where}/{name}: {error}") from None

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"


@contextmanager
def _reachable(path: Path) -> Iterator[None]:
    """Around opening a local file."""
    try:
        yield
    except OSError as error:
        if of_the_place(error):
            raise StoreUnreachable(f"{path} cannot be read: {error.strerror}") from error
        raise


def _group_by_files(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """Split the pieces, in order, into groups that each touch at most ``most`` files."""
    group: list[Piece] = []
    names: set[str] = set()
    for piece in pieces:
        if piece[0] not in names and len(names) == most:
            yield group
            group, names = [], set()
        group.append(piece)
        names.add(piece[0])
    if group:
        yield group


def _read_or_error(store: Store, piece: Piece) -> Checked | OSError:
    try:
        data = store.read(*piece)
        return data, crc32c.crc32c(data)
    except OSError as error:
        return error


def _map(path: Path) -> memoryview:
    with open(os.open(path, _READ), "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _max_files() -> int:
    """How many shards stay open: half of the process's limit of open files."""
    import resource  # not available on every system

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_FILES if soft == resource.RLIM_INFINITY else min(max(soft // 2, 16), _MAX_FILES)
