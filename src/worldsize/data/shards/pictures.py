"""What a picture is, and what is made of it on the way into a shard. Pure functions of bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageFile, __version__

from worldsize.data.crops import Pixels, fit
from worldsize.data.decode import FORMATS, BrokenPicture, decode
from worldsize.data.shards.format import Kind
from worldsize.errors import UserError

# What each of Pillow's formats is called in a shard. MPO is JPEG, several in one file.
_EXTENSION = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "GIF": "gif",
    "TIFF": "tif",
    "PPM": "ppm",
}
_UNKNOWN = "bin"
LONGEST_EXTENSION = max(_EXTENSION.values(), key=len)
_LONGEST = 65_500  # pixels: a side of a JPEG, to libjpeg
_KIND = {"JPEG": Kind.JPEG, "MPO": Kind.JPEG, "PNG": Kind.PNG}


@dataclass(frozen=True)
class Facts:
    """What is known of some bytes.

    Attributes:
        format: Pillow's name, "" if the bytes begin like no picture.
        mode: Pillow's name of how pixels are stored ("L", "CMYK", ...), "" if not known.
        progressive: a JPEG that comes in several scans.
        deep: more than 8 bits a channel.
        transparent: in part, by a channel, a colour or a palette's entry.
        reason: why they cannot be decoded, None where they can.
        picture: decoded, RGB; None where they cannot.
    """

    format: str
    mode: str
    progressive: bool
    deep: bool
    transparent: bool
    reason: str | None
    picture: Image.Image | None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the decoded picture, pixels; (0, 0): there is none."""
        return self.picture.size if self.picture is not None else (0, 0)


def examine(data: bytes) -> Facts:
    """Look at a picture and decode it."""
    kind, mode, progressive, deep, transparent = "", "", False, False, False
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            kind, mode, progressive = str(opened.format), opened.mode, "progressive" in opened.info
            transparent = mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in opened.info
            deep = _deep(opened)
    except Exception:  # a damaged file can raise nearly anything; decode() says what is wrong with it
        pass
    try:
        return Facts(kind, mode, progressive, deep, transparent, None, decode(data))
    except BrokenPicture as error:
        return Facts(kind, mode, progressive, deep, transparent, str(error), None)


def _deep(opened: ImageFile.ImageFile) -> bool:
    """Whether a channel has more than 8 bits, which Pillow's mode tells of grey pictures alone."""
    # The fourth of a tile says how it is stored. A BMP's "BGR;16" are 16 bits a pixel.
    how = [part for tile in opened.tile for part in (tile[3] if isinstance(tile[3], tuple) else (tile[3],))]
    stored = any(isinstance(part, str) and ";16" in part and part != "BGR;16" for part in how)
    largest = max((part for part in how if isinstance(part, int)), default=0) if opened.format == "PPM" else 0
    return opened.mode.startswith(("I", "F")) or stored or largest > 255


@dataclass(frozen=True)
class How:
    """How pictures are stored: as they are, or else.

    Attributes:
        reencode: quality of the JPEG that each becomes, 1 to 100.
        max_side: with ``reencode``: its longer side is at most this, pixels.
        raw: side of the square of pixels that each becomes.
    """

    reencode: int | None = None
    max_side: int | None = None
    raw: int | None = None

    def __post_init__(self) -> None:
        if self.reencode is not None and self.raw is not None:
            raise UserError("--reencode and --raw exclude each other: pictures become JPEGs or raw pixels")
        if self.max_side is not None and self.reencode is None:
            raise UserError("--max-side needs --reencode QUALITY: pictures are made smaller only as they are encoded")
        if self.reencode is not None and not 1 <= self.reencode <= 100:
            raise UserError(f"--reencode {self.reencode}: a JPEG's quality is 1 to 100; 90 is usual")
        if self.max_side is not None and not 1 <= self.max_side <= _LONGEST:
            raise UserError(f"--max-side {self.max_side}: 1 to {_LONGEST:,} pixels; 500 is usual")
        if self.raw is not None and not 8 <= self.raw <= 4096:
            raise UserError(f"--raw {self.raw}: 8 to 4,096 pixels; 256 is usual")

    def made(self) -> dict[str, Any]:
        """For the page of the shards. Pillow's version decides pixels, so it counts where pictures are made anew."""
        changes = {name: value for name, value in vars(self).items() if value is not None}
        return changes | {"pillow": __version__} if changes else {}

    def expected(self, length: int) -> int:
        """About how many bytes a picture of ``length`` bytes will have; known without reading it."""
        if self.raw is not None:
            return len(_ppm_header(self.raw, self.raw)) + self.raw**2 * 3
        # At quality 90, those of ImageNet have about this, and smaller ones hardly less than some kilobytes.
        return min(length, 3 * self.max_side**2 // 10 + 4096) if self.max_side is not None else length


@dataclass(frozen=True)
class Stored:
    """A picture as a shard keeps it; ``kind``, ``components``, ``width`` and ``height`` as in the index."""

    data: bytes
    extension: str
    kind: Kind
    components: int
    width: int
    height: int


def store(data: bytes, how: How) -> Stored:
    """What becomes of an encoded picture. A broken one stays as it is, so that all others keep their places."""
    facts = examine(data)
    if facts.picture is None:
        return Stored(data, _EXTENSION.get(facts.format, _UNKNOWN), Kind.BROKEN, 0, 0, 0)
    if how.raw is not None:
        try:
            return _as_it_is(square := ppm(fit(facts.picture, how.raw, how.raw)), examine(square))
        except BrokenPicture:  # so long and thin that it cannot be resized
            return Stored(data, _EXTENSION[facts.format], Kind.BROKEN, 0, 0, 0)
    if how.reencode is not None:
        return _smaller(data, facts, how.reencode, how.max_side)
    return _as_it_is(data, facts)


def ppm(pixels: Pixels) -> bytes:
    """uint8 (height, width, 3) as a binary PPM, which is stored as `Kind.RAW`."""
    height, width, _ = pixels.shape
    return _ppm_header(width, height) + np.ascontiguousarray(pixels).tobytes()


def _as_it_is(data: bytes, facts: Facts) -> Stored:
    kind = _KIND.get(facts.format, Kind.OTHER)
    header = _ppm_header(*facts.size)
    if data.startswith(header) and len(data) == len(header) + facts.size[0] * facts.size[1] * 3:
        kind = Kind.RAW
    return Stored(data, _EXTENSION[facts.format], kind, Image.getmodebands(facts.mode), *facts.size)


def _smaller(data: bytes, facts: Facts, quality: int, max_side: int | None) -> Stored:
    """As a JPEG (baseline, 4:2:0, grey ones stay grey), never enlarged.

    A JPEG whose size stays and that would not become shorter is kept, but for a progressive one, which takes several
    times as long to decode. So is what stays longer than a JPEG can be.
    """
    picture = facts.picture
    assert picture is not None
    if max_side is not None and max(picture.size) > max_side:
        scale = max_side / max(picture.size)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    if max(picture.size) > _LONGEST:
        return _as_it_is(data, facts)
    if facts.mode == "L":
        picture = picture.convert("L")
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=quality, subsampling="4:2:0")
    keep = facts.format == "JPEG" and facts.mode in ("L", "RGB") and not facts.progressive and picture.size == facts.size
    if keep and out.tell() >= len(data):
        return _as_it_is(data, facts)
    return Stored(out.getvalue(), _EXTENSION["JPEG"], Kind.JPEG, len(picture.getbands()), *picture.size)


def _ppm_header(width: int, height: int) -> bytes:
    return b"P6\n%d %d\n255\n" % (width, height)
