"""``worldsize data verify``: decode every image of a dataset once, and collect broken, odd and duplicate ones."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from worldsize.data.images.pillow import BrokenImage
from worldsize.data.progress_bar import ByteProgress
from worldsize.data.samples import ArraySamples, Dataset, EncodedSamples, NotAFile, Samples
from worldsize.data.shards.check import fault
from worldsize.data.shards.images import ImageFacts, examine, ppm
from worldsize.data.shards.samples import ShardSamples
from worldsize.errors import Forbidden, ReadFailed, WorldsizeError

TINY = 32  # shorter side, pixels
HUGE = 25_000_000  # pixels
TURNED = "rotated or mirrored by EXIF, which is ignored"
_CHUNK = 64
_DIGEST = 16  # bytes: the chance of a collision among 50 million different images is 1 in 10^23

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
    """The results for one split.

    Attributes:
        samples: the split.
        digests: uint8 (n, 16), of each image's bytes (as PPM, if it is stored as pixels).
        broken: reasons, by index.
        unread: why images could not be read, which says nothing about them, by index.
        odd: indices of odd images, by what is odd.
        bytes: total size of all images.
    """

    samples: Samples
    digests: NDArray[np.uint8]
    broken: dict[int, str] = field(default_factory=dict)
    unread: dict[int, WorldsizeError] = field(default_factory=dict)
    odd: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    bytes: int = 0

    @property
    def content(self) -> str:
        """Hex fingerprint of all bytes, labels and classes in order. Originals and their shards have the same one."""
        digest = hashlib.sha256("\0".join(self.samples.classes).encode("utf-8", "surrogateescape"))
        digest.update(np.ascontiguousarray(self.samples.labels).data)
        digest.update(self.digests.data)
        return digest.hexdigest()


def verify(dataset: Dataset, workers: int) -> dict[str, Found]:
    """Read and decode every image once, in ``workers`` threads. Returns results by split name.

    Raises:
        DataError: the index of the shards is damaged.
    """
    splits = {"train": dataset.train, "val": dataset.val}
    found = {name: Found(samples, np.zeros((len(samples), _DIGEST), np.uint8)) for name, samples in splits.items()}
    total, read, seen = sum(map(len, splits.values())), 0, 0
    with ByteProgress("verifying") as meter, ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        for one in found.values():
            if isinstance(one.samples, ShardSamples):
                one.samples.check_index()
            for images in pool.map(_chunk(one.samples), range(0, len(one.samples), _CHUNK)):
                for image in images:
                    _record(one, image)
                seen, read = seen + len(images), read + sum(image.length for image in images)
                meter.total = read * total // seen  # estimated from the images so far
                meter.at(read)
    return found


@dataclass(frozen=True)
class _Image:
    index: int
    length: int
    digest: bytes
    reason: str | None
    odd: list[str]
    unread: WorldsizeError | None = None


def _chunk(samples: Samples) -> Callable[[int], list[_Image]]:
    check = _check_encoded if isinstance(samples, EncodedSamples) else _check_pixels
    return lambda start: [check(samples, index) for index in range(start, min(start + _CHUNK, len(samples)))]


def _check_pixels(samples: Samples, index: int) -> _Image:
    assert isinstance(samples, ArraySamples)
    data = ppm(samples.stored(index))  # as in a shard
    return _Image(index, len(data), _digest(data), None, [])


def _check_encoded(samples: Samples, index: int) -> _Image:
    assert isinstance(samples, EncodedSamples)
    try:
        data = bytes(samples.encoded(index))
        reason = fault(samples, index) if isinstance(samples, ShardSamples) else None
    except NotAFile as error:
        return _Image(index, 0, _NO_BYTES, str(error), [])  # as stored in a shard
    except BrokenImage as error:
        return _Image(index, 0, _unknown(samples, index), str(error), [])
    except (ReadFailed, Forbidden) as error:
        return _Image(index, 0, _unknown(samples, index), None, [], error)
    facts = examine(data)
    reason = facts.reason or reason
    return _Image(index, len(data), _digest(data), reason, list(_oddities(facts, _extension(samples, index))))


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


_NO_BYTES = _digest(b"")


def _unknown(samples: Samples, index: int) -> bytes:
    """A digest of its own: images without known bytes are not duplicates of each other."""
    return _digest(f"unread {samples.name(index)}".encode("utf-8", "surrogateescape"))


def _extension(samples: EncodedSamples, index: int) -> str | None:
    """The extension of the image's name; None if packing re-encoded the image but kept the original's name."""
    if isinstance(samples, ShardSamples) and samples.made:
        return None
    name = samples.path(index).rsplit("/", 1)[-1]
    return name.rsplit(".", 1)[1].lower() if "." in name else None


def _oddities(facts: ImageFacts, extension: str | None) -> Iterator[str]:
    """What is odd about an image. These texts are keys of the JSON report."""
    if extension is not None and facts.format and extension not in _EXTENSIONS[facts.format]:
        yield f"{facts.format} named .{extension}"
    if facts.image is None:
        return
    if facts.mode == "CMYK":
        yield "CMYK"
    if facts.deep:
        yield "more than 8 bits a channel"
    if facts.transparent:
        yield "transparent, which is ignored"
    if facts.turned:
        yield TURNED
    width, height = facts.size
    if min(width, height) < TINY:
        yield f"tiny (a side below {TINY} pixels)"
    if width * height > HUGE:
        yield f"very large (above {HUGE // 1_000_000} million pixels)"


def _record(found: Found, image: _Image) -> None:
    found.digests[image.index] = np.frombuffer(image.digest, np.uint8)
    found.bytes += image.length
    if image.reason is not None:
        found.broken[image.index] = image.reason
    if image.unread is not None:
        found.unread[image.index] = image.unread
    for kind in image.odd:
        found.odd[kind].append(image.index)


def require_read(found: dict[str, Found]) -> None:
    """Raise the error of an image that could not be read, if there is one."""
    unread = [error for one in found.values() for error in one.unread.values()]
    if unread:
        more = f" ({len(unread):,} images cannot be read)" if len(unread) > 1 else ""
        raise type(unread[0])(f"{unread[0]}{more}")


Place = tuple[str, int]  # split and index


def duplicates(found: dict[str, Found]) -> list[list[Place]]:
    """Groups of two or more images with the same bytes, in the order of their first images. Empty images are left out."""
    digests = np.concatenate([one.digests for one in found.values()])
    places = [(name, len(one.digests)) for name, one in found.items()]
    _, group, count = np.unique(digests.view(f"V{_DIGEST}").ravel(), return_inverse=True, return_counts=True)
    groups: dict[int, list[Place]] = {}
    has_bytes = (digests != np.frombuffer(_NO_BYTES, np.uint8)).any(axis=1)
    for position in np.flatnonzero((count[group] > 1) & has_bytes):
        groups.setdefault(int(group[position]), []).append(_place(int(position), places))
    return list(groups.values())


def _place(position: int, places: list[tuple[str, int]]) -> Place:
    for name, length in places:
        if position < length:
            return name, position
        position -= length
    raise IndexError(position)
