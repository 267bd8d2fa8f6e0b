"""A split of a dataset whose images are files."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from worldsize.data.file_contents import FileContents
from worldsize.data.images import native
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.read_errors import Patience
from worldsize.data.samples import EncodedSamples, NotAFile, Read, stored_or_error
from worldsize.data.unused_files import Unused
from worldsize.distributed.world import World
from worldsize.errors import DataChanged
from worldsize.watchdog import heartbeat

T = TypeVar("T")


class FileSamples(EncodedSamples):
    """Images in files. In memory, a sample uses its file name, 16 bytes of offset and content, and 4 bytes of label.

    Args:
        root: the folder of the split.
        folders: each class's folder, relative to ``root`` ("" if there are no class folders); empty if images have several
            labels.
        files: all file names (without folder), UTF-8, concatenated; paths relative to ``root`` if there are no ``folders``.
        ends: int64 (n,), the end of each name in ``files``.
        labels: int32 (n,), or uint8 (n, classes).
        classes: names in label order.

    Attributes:
        unused: images in these folders that are not among the samples.
    """

    def __init__(
        self,
        root: Path,
        folders: tuple[str, ...],
        files: bytes,
        ends: NDArray[np.int64],
        labels: NDArray[np.int32] | NDArray[np.uint8],
        classes: tuple[str, ...],
    ) -> None:
        self.root = root
        self.folders = folders
        self.files = files
        self.ends = ends
        self.labels = labels
        self.unused = Unused()
        self._patience = Patience()
        self._contents = FileContents(len(ends))
        self._folder_of = labels  # stays when images get other labels
        self.classes = classes
        digest = hashlib.sha256("\0".join((*classes, *folders)).encode("utf-8", "surrogateescape"))
        for part in (files, ends.tobytes(), labels.tobytes()):
            digest.update(part)
        self.fingerprint = digest.hexdigest()

    def name(self, index: int) -> str:
        return str(self._path(index))

    def path(self, index: int) -> str:
        return self._path(index).relative_to(self.root).as_posix()

    def length(self, index: int) -> int:
        status = self._read(index, self._path(index), os.stat)
        _require_regular(status)
        return status.st_size

    def encoded(self, index: int) -> bytes:
        path = self._path(index)
        content = self._read(index, path, _content)
        self._contents.check(index, path, content)
        return content

    def several(self, indices: NDArray[np.int64]) -> list[Read] | NDArray[np.uint8]:
        library = native.load()
        if library is None or not len(indices):
            return super().several(indices)
        paths = [self._bytes_of_path(index) for index in indices.tolist()]
        others = f" or one of {len(paths) - 1} others" if len(paths) > 1 else ""
        with heartbeat.reading(os.fsdecode(paths[0]) + others):
            contents, checksums = library.files(paths)
        read = np.array([i for i, content in enumerate(contents) if content is not None], np.int64)
        sizes = np.array([len(content) for content in contents if content is not None], np.int64)
        self._contents.check_all(indices[read], sizes, checksums[read], self._path)
        return [
            content if content is not None else stored_or_error(self, index)
            for content, index in zip(contents, indices.tolist(), strict=True)
        ]

    def share(self, world: World) -> None:
        index = self._contents.share(world)
        if index is not None:
            raise DataChanged(
                f"{self.name(index)} has different content on rank {world.rank} than on another rank: it changed, or the "
                "hosts have different copies; make them equal, then start again"
            )

    def opened(self, index: int) -> BinaryIO:
        return self._read(index, self._path(index), _opened)

    def _read(self, index: int, path: Path, read: Callable[[Path], T]) -> T:
        try:
            return self._patience.read(path, lambda: read(path))
        except OSError as error:
            self._contents.check_missing(index, path, error)
            raise _unreadable(path, error) from error

    def _bytes_of_path(self, index: int) -> bytes:
        """The same as `_path`, without its many operations."""
        start = self.ends[index - 1] if index else 0
        folder = self._folders[self._folder_of[index] if self.folders else 0]
        return os.path.join(folder, self.files[start : self.ends[index]])

    @cached_property
    def _folders(self) -> list[bytes]:
        """The folder of each class, or the one of all images; empty instead of ``.``, as in `_path`."""
        folders = (self.root / folder for folder in self.folders or ("",))
        return [b"" if folder == Path() else os.fsencode(folder) for folder in folders]

    def _path(self, index: int) -> Path:
        start = int(self.ends[index - 1]) if index else 0
        file = self.files[start : int(self.ends[index])].decode("utf-8", "surrogateescape")
        return self.root / (self.folders[self._folder_of[index]] if self.folders else "") / file


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _content(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read()


def _opened(path: Path) -> io.FileIO:
    # Without O_NONBLOCK, opening a FIFO blocks until there is a writer. For regular files, it has no effect.
    try:
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device that is gone
            _require_regular(os.stat(path))
        raise
    try:
        _require_regular(os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFile(f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a regular file")


def _unreadable(path: Path, error: OSError) -> BrokenImage:
    """Explain why this file itself cannot be opened or read."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and path.is_symlink():
        return NotAFile("is a dangling symbolic link")
    return BrokenImage(f"cannot be read: {error.strerror}")
