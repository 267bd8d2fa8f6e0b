"""Where shards are read from: files of this machine, mapped, or anything that fsspec reaches."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import Any

from worldsize.data.stores import faults_as_oserror
from worldsize.errors import UserError

log = logging.getLogger(__name__)

Bytes = bytes | memoryview
_PAUSES_S = (1, 2, 4, 8, 8)  # as long as stopping a run may have to wait for


class Store(ABC):
    """The files of one folder. Everything may be called from many threads, and raises OSError.

    Attributes:
        where: the folder, as the user named it.
    """

    where: str

    @abstractmethod
    def whole(self, name: str) -> Bytes:
        """All of the file; where it is mapped, only what is touched takes memory."""

    @abstractmethod
    def look(self, name: str, length: int) -> tuple[int, bytes]:
        """How many bytes a file has, and the first ``length``, where it may never be read further."""

    @abstractmethod
    def read(self, name: str, offset: int, length: int) -> Bytes:
        """These bytes of the file, fewer where it ends before."""

    @abstractmethod
    def copy(self, name: str, offset: int, length: int) -> bytes:
        """The same, in memory when this returns."""


class Local(Store):
    """Files that are mapped when they are first read, and not copied.

    A mapping that is still in use when others take its place lives on until nobody holds a slice of it.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        self._lock = threading.Lock()
        self._maps: OrderedDict[str, memoryview] = OrderedDict()
        self._most = _most_mappings()

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

    def read(self, name: str, offset: int, length: int) -> memoryview:
        with self._lock:
            view = self._maps.get(name)
            if view is not None:
                self._maps.move_to_end(name)
        if view is None:
            view = _mapped(self._folder / name)
            with self._lock:
                self._maps[name] = view
                if len(self._maps) > self._most:
                    self._maps.popitem(last=False)
        return view[offset : offset + length]

    def copy(self, name: str, offset: int, length: int) -> bytes:
        with open(f"{self.where}/{name}", "rb", buffering=0) as file:
            file.seek(offset)
            return file.read(length)


class Remote(Store):
    """Files at a URL (``s3://BUCKET/FOLDER``, ``gs://``, ``https://``, ...), one request for each read.

    A read that fails is tried again for a while: who reads is in the middle of a long run.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.where = url
        try:
            self._files, self._folder = url_to_fs(url)
        except (ImportError, ValueError) as error:  # fsspec says which package is missing, or that it knows no such kind
            raise UserError(f"{url}: {error}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, (self.where,)

    def whole(self, name: str) -> bytes:
        with faults_as_oserror():
            return bytes(self._files.cat_file(self._path(name)))

    def look(self, name: str, length: int) -> tuple[int, bytes]:
        with faults_as_oserror():
            return int(self._files.size(self._path(name))), self._part(name, 0, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        for pause in _PAUSES_S:
            try:
                return self._part(name, offset, length)
            except (FileNotFoundError, PermissionError):
                raise
            except OSError as error:
                log.warning("%s does not give %s (%s); trying again in %d s", self.where, name, error, pause)
                time.sleep(pause)
        return self._part(name, offset, length)

    def copy(self, name: str, offset: int, length: int) -> bytes:
        return self.read(name, offset, length)

    def _part(self, name: str, offset: int, length: int) -> bytes:
        with faults_as_oserror():
            return bytes(self._files.cat_file(self._path(name), start=offset, end=offset + length))

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"


def _mapped(path: Path) -> memoryview:
    # Until Python 3.13 a mapping keeps a file descriptor.
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **options))


def _most_mappings() -> int:
    """How many shards are kept mapped: half of what the system allows to one process."""
    if sys.version_info >= (3, 13):
        return 32_000
    import resource  # not on every system

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 32_000 if soft == resource.RLIM_INFINITY else min(max(soft // 2, 16), 32_000)
