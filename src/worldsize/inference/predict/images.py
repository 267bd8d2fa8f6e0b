"""The images that a user names: files, folders, shards, a list of names, or one image on standard input."""

from __future__ import annotations

import os
import sys
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from worldsize.data import shards
from worldsize.data.complete_tar import CompleteEntry
from worldsize.data.datasets import file_index
from worldsize.data.file_samples import FileSamples
from worldsize.data.images.pillow import BrokenImage, looks_like_image
from worldsize.data.read_errors import Patience
from worldsize.data.samples import EncodedSamples, Read, Stored
from worldsize.errors import UserError

STDIN = "-"


class Images(EncodedSamples):
    """Images of several sources, one source after the other, without labels.

    Args:
        sources: at least one; their labels do not matter.
        classes: of the network that will see them.
    """

    def __init__(self, sources: Sequence[EncodedSamples], classes: tuple[str, ...]) -> None:
        self._sources = sources
        self._starts = [0, *accumulate(len(source) for source in sources)]
        self.classes = classes
        self.labels = np.zeros(self._starts[-1], np.int32)
        self.fingerprint = ""

    def _at(self, index: int) -> tuple[EncodedSamples, int]:
        source = bisect_right(self._starts, index) - 1
        return self._sources[source], index - self._starts[source]

    def name(self, index: int) -> str:
        source, own = self._at(index)
        return source.name(own)

    def path(self, index: int) -> str:
        source, own = self._at(index)
        return source.path(own)

    def length(self, index: int) -> int:
        source, own = self._at(index)
        return source.length(own)

    def encoded(self, index: int) -> bytes | memoryview:
        source, own = self._at(index)
        return source.encoded(own)

    def stored(self, index: int) -> Stored:
        source, own = self._at(index)
        return source.stored(own)

    @property
    def reads_many(self) -> bool:
        return all(source.reads_many for source in self._sources)

    def several(self, indices: NDArray[np.int64]) -> list[Read]:
        found: dict[int, Read] = {}
        at = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(at).tolist():
            places = np.flatnonzero(at == number)
            read = self._sources[number].several(indices[places] - self._starts[number])
            found |= zip(places.tolist(), read, strict=True)
        return [found[place] for place in range(len(indices))]


class Bytes(EncodedSamples):
    """Encoded images that have been read, with their names."""

    def __init__(self, names: Sequence[str], images: Sequence[bytes]) -> None:
        self._names, self._images = names, images
        self.labels, self.classes, self.fingerprint = np.zeros(len(names), np.int32), (), ""

    def name(self, index: int) -> str:
        return self._names[index]

    path = name

    def length(self, index: int) -> int:
        return len(self._images[index])

    def encoded(self, index: int) -> bytes:
        return self._images[index]


class Members(EncodedSamples):
    """The images in a tar file, such as a shard, read where they are."""

    def __init__(self, tar: Path) -> None:
        self._tar, self._patience = tar, Patience()
        try:
            with tarfile.open(tar, "r:", tarinfo=CompleteEntry) as file:
                found = [m for m in file if m.isfile() and file_index.has_image_extension(m.name)]
        except (OSError, tarfile.TarError) as error:
            raise UserError(f"{tar} cannot be read as a tar file: {error}") from None
        self._members = [(m.name, m.offset_data, m.size) for m in found]
        self.labels, self.classes, self.fingerprint = np.zeros(len(found), np.int32), (), ""

    def name(self, index: int) -> str:
        return f"{self._tar}: {self._members[index][0]}"

    def path(self, index: int) -> str:
        return self._members[index][0]

    def length(self, index: int) -> int:
        return self._members[index][2]

    def encoded(self, index: int) -> bytes:
        _, offset, size = self._members[index]

        def read() -> bytes:
            with open(self._tar, "rb") as file:
                return os.pread(file.fileno(), size, offset)

        try:
            return self._patience.read(self._tar, read)
        except OSError as error:
            raise BrokenImage(f"cannot be read: {error.strerror}") from error


def find(
    paths: Iterable[str], classes: tuple[str, ...], read_stdin: Callable[[], bytes] = lambda: sys.stdin.buffer.read()
) -> Images:
    """The images that ``paths`` mean, in this order.

    A folder means all images in it and in its folders, by name; a folder of shards, those of all its splits; a tar file,
    those in it. ``-`` means what ``read_stdin`` returns: one image, or a list of paths, one per line.

    Raises:
        UserError: a path does not exist or has no images, or standard input is neither.
    """
    sources: list[EncodedSamples] = []
    files: list[str] = []

    def close() -> None:
        if files:
            sources.append(_files(files))
            files.clear()

    for path in _expanded(paths, read_stdin):
        if isinstance(path, str) and _is_plain(path):
            files.append(path)
        else:
            close()
            sources.extend(_of(path))
    close()
    if not any(map(len, sources)):
        raise UserError("there is no image to predict: pass files, folders, shards, or - for standard input")
    return Images([source for source in sources if len(source)], classes)


def _expanded(paths: Iterable[str], read_stdin: Callable[[], bytes]) -> Iterable[str | Bytes]:
    for path in paths:
        if path != STDIN:
            yield path
            continue
        content = read_stdin()
        if looks_like_image(content[:16]):
            yield Bytes(["standard input"], [content])
        elif b"\0" in content:
            raise UserError("standard input is neither an image of a known format nor a list of paths, one per line")
        else:
            # Not splitlines(): a name may contain U+2028. Lists from Windows end lines with \r\n.
            yield from filter(None, (line.removesuffix("\r") for line in os.fsdecode(content).split("\n")))


def _is_plain(path: str) -> bool:
    """Whether this is a file that is read as an image, whatever it contains."""
    if not Path(path).exists():
        raise UserError(f"{path}: no such file or folder")
    return not Path(path).is_dir() and not path.endswith(".tar")


def _of(path: str | Bytes) -> list[EncodedSamples]:
    if isinstance(path, Bytes):
        return [path]
    if path.endswith(".tar"):
        found: list[EncodedSamples] = [Members(Path(path))]
    elif shards.is_packed(Path(path)):
        dataset = shards.open_dataset(Path(path))
        found = [split for split in (dataset.train, dataset.val) if isinstance(split, EncodedSamples)]
    else:
        found = [_files([os.path.join(path, name) for name in file_index.below(Path(path))])]
    if not any(map(len, found)):
        raise UserError(f"{path} contains no images")
    return found


def _files(paths: list[str]) -> FileSamples:
    names = [os.fsencode(path) for path in paths]
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    return FileSamples(Path(), (), b"".join(names), ends, np.zeros(len(names), np.int32), ())
