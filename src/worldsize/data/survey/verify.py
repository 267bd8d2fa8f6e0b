"""``worldsize data verify``: every picture of a data set decoded once, and what is remarkable about them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from worldsize.data.decode import BrokenPicture
from worldsize.data.fetching.progress import Meter
from worldsize.data.samples import Dataset, EncodedSamples, Samples
from worldsize.data.shards.check import fault
from worldsize.data.shards.pictures import Facts, examine, ppm
from worldsize.data.shards.samples import ShardSamples

TINY = 32  # shorter side, pixels
HUGE = 25_000_000  # pixels
_CHUNK = 64
_DIGEST = 16  # bytes: of 50 million different pictures, two have the same digest by a chance of 1 in 10^23

_EXTENSIONS = {
    "JPEG": {"jpg", "jpeg", "jpe", "jfif"},
    "MPO": {"jpg", "jpeg", "mpo"},
    "PNG": {"png"},
    "WEBP": {"webp"},
    "BMP": {"bmp", "dib"},
    "GIF": {"gif"},
    "TIFF": {"tif", "tiff"},
    "PPM": {"ppm", "pgm", "pbm", "pnm"},
}


@dataclass
class Found:
    """What was found in one split.

    Attributes:
        samples: the split.
        digests: uint8 (n, 16), of each picture's bytes (those of a PPM, where it is kept as pixels).
        broken: why, by index.
        odd: indices, by what is odd about them.
        bytes: of all pictures.
    """

    samples: Samples
    digests: NDArray[np.uint8]
    broken: dict[int, str] = field(default_factory=dict)
    odd: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    bytes: int = 0

    @property
    def content(self) -> str:
        """Fingerprint (hex) of all bytes, labels and classes in order; the same of originals and of their shards."""
        digest = hashlib.sha256("\0".join(self.samples.classes).encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(self.samples.labels).data)
        digest.update(self.digests.data)
        return digest.hexdigest()


def verify(dataset: Dataset, workers: int) -> dict[str, Found]:
    """Read and decode every picture once, in ``workers`` threads; by the split's name.

    Raises:
        DataError: an index of shards is damaged.
    """
    splits = {"train": dataset.train, "val": dataset.val}
    found = {name: Found(samples, np.zeros((len(samples), _DIGEST), np.uint8)) for name, samples in splits.items()}
    total, read, seen = sum(map(len, splits.values())), 0, 0
    with Meter("verifying") as meter, ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        for one in found.values():
            if isinstance(one.samples, ShardSamples):
                one.samples.check_index()
            for pictures in pool.map(_chunk(one.samples), range(0, len(one.samples), _CHUNK)):
                for picture in pictures:
                    _note(one, picture)
                seen, read = seen + len(pictures), read + sum(picture.length for picture in pictures)
                meter.total = read * total // seen  # from what the pictures so far had
                meter.at(read)
    return found


@dataclass(frozen=True)
class _Picture:
    index: int
    length: int
    digest: bytes
    reason: str | None
    odd: list[str]


def _chunk(samples: Samples) -> Callable[[int], list[_Picture]]:
    look = _look_encoded if isinstance(samples, EncodedSamples) else _look_pixels
    return lambda start: [look(samples, index) for index in range(start, min(start + _CHUNK, len(samples)))]


def _look_pixels(samples: Samples, index: int) -> _Picture:
    assert samples.pixels is not None
    data = ppm(samples.pixels[index])  # as in a shard
    return _Picture(index, len(data), _digest(data), None, [])


def _look_encoded(samples: Samples, index: int) -> _Picture:
    assert isinstance(samples, EncodedSamples)
    try:
        data = bytes(samples.encoded(index))
    except BrokenPicture as error:
        # No two pictures that cannot be read are the same one.
        return _Picture(
            index, 0, _digest(f"unread {samples.name(index)}".encode("utf-8", "surrogateescape")), str(error), []
        )
    facts = examine(data)
    reason = facts.reason
    if isinstance(samples, ShardSamples) and reason is None:
        reason = fault(samples, index)
    return _Picture(index, len(data), _digest(data), reason, list(_oddities(facts, _extension(samples, index))))


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _extension(samples: EncodedSamples, index: int) -> str | None:
    """Of the picture's name; None where pictures were made anew under the names of the originals."""
    if isinstance(samples, ShardSamples) and samples.made:
        return None
    name = samples.path(index).rsplit("/", 1)[-1]
    return name.rsplit(".", 1)[1].lower() if "." in name else None


def _oddities(facts: Facts, extension: str | None) -> Iterator[str]:
    """What is odd about a picture, in words that group them."""
    if extension is not None and facts.format and extension not in _EXTENSIONS[facts.format]:
        yield f"{facts.format} named .{extension}"
    if facts.picture is None:
        return
    if facts.mode == "CMYK":
        yield "CMYK"
    if facts.deep:
        yield "more than 8 bits a channel"
    if facts.transparent:
        yield "transparent, which is ignored"
    width, height = facts.size
    if min(width, height) < TINY:
        yield f"tiny (a side below {TINY} pixels)"
    if width * height > HUGE:
        yield f"very large (above {HUGE // 1_000_000} million pixels)"


def _note(found: Found, picture: _Picture) -> None:
    found.digests[picture.index] = np.frombuffer(picture.digest, np.uint8)
    found.bytes += picture.length
    if picture.reason is not None:
        found.broken[picture.index] = picture.reason
    for kind in picture.odd:
        found.odd[kind].append(picture.index)


Place = tuple[str, int]  # split and index


def duplicates(found: dict[str, Found]) -> list[list[Place]]:
    """Groups of pictures with the same bytes, of two or more each, in the order of their first ones."""
    digests = np.concatenate([one.digests for one in found.values()])
    places = [(name, len(one.digests)) for name, one in found.items()]
    _, group, count = np.unique(digests.view(f"V{_DIGEST}").ravel(), return_inverse=True, return_counts=True)
    groups: dict[int, list[Place]] = {}
    for position in np.flatnonzero(count[group] > 1):
        groups.setdefault(int(group[position]), []).append(_place(int(position), places))
    return list(groups.values())


def _place(position: int, places: list[tuple[str, int]]) -> Place:
    for name, length in places:
        if position < length:
            return name, position
        position -= length
    raise IndexError(position)
