"""Inspecting images and converting them for a shard. Pure functions of bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageFile, __version__

from worldsize.data.images.crops import Pixels, fit
from worldsize.data.images.pillow import BrokenImage, decoded, opened_or_broken
from worldsize.data.shards.format import Encoding
from worldsize.errors import UserError

# File extension in a shard of each of Pillow's formats. MPO is a file with several JPEGs.
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
_MAX_JPEG_SIDE = 65_500  # pixels; libjpeg's limit
_KIND = {"JPEG": Encoding.JPEG, "MPO": Encoding.JPEG, "PNG": Encoding.PNG}


@dataclass(frozen=True)
class ImageFacts:
    """Properties of an encoded image.

    Attributes:
        format: Pillow's format name, "" if the bytes are not an image.
        mode: Pillow's pixel mode ("L", "CMYK", ...), "" if unknown.
        progressive: a progressive JPEG.
        deep: more than 8 bits per channel.
        transparent: it has an alpha channel, a transparent color or a transparent palette entry.
        reason: why it cannot be decoded; None if it can.
        image: the decoded image, RGB; None if it cannot be decoded.
        turned: EXIF says that it is rotated or mirrored, and decoding ignores that.
    """

    format: str
    mode: str
    progressive: bool
    deep: bool
    transparent: bool
    reason: str | None
    image: Image.Image | None
    turned: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the decoded image, pixels; (0, 0) if it cannot be decoded."""
        return self.image.size if self.image is not None else (0, 0)


def examine(data: bytes) -> ImageFacts:
    """Inspect and decode an image."""
    facts = ImageFacts("", "", False, False, False, None, None)

    def inspect(image: ImageFile.ImageFile) -> ImageFacts:
        nonlocal facts
        facts = _header(image)  # first: decoding forgets some of it
        return replace(facts, image=decoded(image), turned=_turned(image))

    try:
        return opened_or_broken(data, inspect)
    except BrokenImage as error:
        return replace(facts, reason=str(error))


def _header(image: ImageFile.ImageFile) -> ImageFacts:
    """The facts that do not require decoding."""
    transparent = image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info
    progressive = "progressive" in image.info
    return ImageFacts(str(image.format), image.mode, progressive, _deep(image), transparent, None, None)


def _turned(image: ImageFile.ImageFile) -> bool:
    """Whether EXIF says that the image is rotated or mirrored. Pillow itself turns a TIFF."""
    try:
        return image.format != "TIFF" and image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
    except Exception:  # damaged EXIF can raise almost anything, and is ignored
        return False


def _deep(opened: ImageFile.ImageFile) -> bool:
    """Whether a channel has more than 8 bits. Pillow's mode shows this only for grayscale images."""
    # The fourth entry of a tile is its raw mode. In a BMP, "BGR;16" means 16 bits per pixel, not per channel.
    raw_modes = [part for tile in opened.tile for part in (tile[3] if isinstance(tile[3], tuple) else (tile[3],))]
    has_16_bits = any(isinstance(part, str) and ";16" in part and part != "BGR;16" for part in raw_modes)
    max_value = max((part for part in raw_modes if isinstance(part, int)), default=0) if opened.format == "PPM" else 0
    return opened.mode.startswith(("I", "F")) or has_16_bits or max_value > 255


@dataclass(frozen=True)
class How:
    """How images are converted when packed; by default they are stored unchanged.

    Attributes:
        reencode: convert to JPEG of this quality, 1 to 100.
        max_side: with ``reencode``: shrink to this longer side at most, pixels.
        raw: store as raw pixels, a square with this side.
    """

    reencode: int | None = None
    max_side: int | None = None
    raw: int | None = None

    def __post_init__(self) -> None:
        if self.reencode is not None and self.raw is not None:
            raise UserError("--reencode and --raw cannot be combined: images become either JPEGs or raw pixels")
        if self.max_side is not None and self.reencode is None:
            raise UserError("--max-side requires --reencode QUALITY: images are only resized when they are re-encoded")
        if self.reencode is not None and not 1 <= self.reencode <= 100:
            raise UserError(f"--reencode {self.reencode}: JPEG quality must be 1 to 100; 90 is usual")
        if self.max_side is not None and not 1 <= self.max_side <= _MAX_JPEG_SIDE:
            raise UserError(f"--max-side {self.max_side} must be 1 to {_MAX_JPEG_SIDE:,} pixels; 500 is usual")
        if self.raw is not None and not 8 <= self.raw <= 4096:
            raise UserError(f"--raw {self.raw} must be 8 to 4,096 pixels; 256 is usual")

    def made(self) -> dict[str, Any]:
        """The entry for index.json. Includes Pillow's version if images are converted, because the pixels depend on it."""
        changes = {name: value for name, value in vars(self).items() if value is not None}
        return changes | {"pillow": __version__} if changes else {}

    def expected(self, length: int) -> int:
        """Estimated bytes after conversion of an image of ``length`` bytes, without reading it."""
        if self.raw is not None:
            return len(_ppm_header(self.raw, self.raw)) + self.raw**2 * 3
        # Fits ImageNet at quality 90. Even small images need a few kilobytes.
        return min(length, 3 * self.max_side**2 // 10 + 4096) if self.max_side is not None else length


@dataclass(frozen=True)
class Stored:
    """An image as stored in a shard; ``kind``, ``components``, ``width`` and ``height`` as in the index."""

    data: bytes
    extension: str
    kind: Encoding
    components: int
    width: int
    height: int


def store(data: bytes, how: How) -> Stored:
    """Convert an encoded image. A broken one is stored unchanged, so that all other images keep their indices."""
    facts = examine(data)
    if facts.image is None:
        return Stored(data, _EXTENSION.get(facts.format, _UNKNOWN), Encoding.BROKEN, 0, 0, 0)
    if how.raw is not None:
        try:
            square = ppm(fit(facts.image, how.raw, how.raw))
        except BrokenImage:  # too long and thin to resize
            return Stored(data, _EXTENSION[facts.format], Encoding.BROKEN, 0, 0, 0)
        return Stored(square, _EXTENSION["PPM"], Encoding.RAW, 3, how.raw, how.raw)
    if how.reencode is not None:
        return _reencoded(data, facts, how.reencode, how.max_side)
    return _unchanged(data, facts)


def ppm(pixels: Pixels) -> bytes:
    """uint8 (height, width, 3) as a binary PPM, which is stored as `Encoding.RAW`."""
    height, width, _ = pixels.shape
    return _ppm_header(width, height) + np.ascontiguousarray(pixels).tobytes()


def _unchanged(data: bytes, facts: ImageFacts) -> Stored:
    kind = _KIND.get(facts.format, Encoding.OTHER)
    header = _ppm_header(*facts.size)
    if data.startswith(header) and len(data) == len(header) + facts.size[0] * facts.size[1] * 3:
        kind = Encoding.RAW
    return Stored(data, _EXTENSION[facts.format], kind, Image.getmodebands(facts.mode), *facts.size)


def _reencoded(data: bytes, facts: ImageFacts, quality: int, max_side: int | None) -> Stored:
    """Convert to a baseline 4:2:0 JPEG; grayscale stays grayscale. Never enlarges.

    Keeps a JPEG unchanged if it is not resized and would not get smaller, unless it is progressive, which takes several
    times as long to decode. Also keeps images that are too large for JPEG.
    """
    image = facts.image
    assert image is not None
    if max_side is not None and max(image.size) > max_side:
        scale = max_side / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    if max(image.size) > _MAX_JPEG_SIDE:
        return _unchanged(data, facts)
    if facts.mode == "L":
        image = image.convert("L")
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality, subsampling="4:2:0")
    keep = facts.format == "JPEG" and facts.mode in ("L", "RGB") and not facts.progressive and image.size == facts.size
    if keep and out.tell() >= len(data):
        return _unchanged(data, facts)
    return Stored(out.getvalue(), _EXTENSION["JPEG"], Encoding.JPEG, len(image.getbands()), *image.size)


def _ppm_header(width: int, height: int) -> bytes:
    return b"P6\n%d %d\n255\n" % (width, height)
