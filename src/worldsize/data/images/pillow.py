"""Decode images to RGB. The content determines the format, never the file name."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import TypeVar

from PIL import Image, ImageFile, ImageOps

T = TypeVar("T")

# The common formats only: fewer decoders are a smaller attack surface for malicious files.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

# The longer side in units of the shorter one, above which an image is broken: resized so that the shorter side has the usual
# 256 pixels, it would have more pixels than Pillow's limit against decompression bombs.
LONGEST = 178_956_970 // 256**2

# Pillow warns about large but allowed images, palettes with transparency and damaged EXIF, which need no action.
# Set once at import: filters are global to the process, and images are decoded in threads.
warnings.filterwarnings("ignore", module=r"PIL\.")


class BrokenImage(Exception):
    """The image cannot be read or decoded. The message gives the reason."""


def decode(data: bytes) -> Image.Image:
    """Decode an image to RGB with 8 bits per channel. Of an animation, decode the first frame.

    Grayscale, palette, CMYK, 16-bit and transparent images are converted (see `to_rgb`); transparency is dropped, as in
    torchvision.
    EXIF is ignored, including the orientation (except in TIFFs, which Pillow itself rotates). Pillow's size limit against
    decompression bombs stays on: an image of more than 179 megapixels is broken. So is one that is more than `LONGEST` times
    as long as wide: not every crop and conversion could use it.

    Raises:
        BrokenImage: not an image, truncated, damaged, too large, or of numbers without a known range.
    """
    return opened_or_broken(data, decoded)


def opened_or_broken(data: bytes, use: Callable[[ImageFile.ImageFile], T]) -> T:
    """What ``use`` returns for the opened image.

    Raises:
        BrokenImage: opening the image or ``use`` raised something. Says why.
    """
    if not data:
        raise BrokenImage("empty file")
    try:
        return opened(data, use)
    except BrokenImage:
        raise
    except Exception as error:  # damaged files make decoders raise exceptions of many types
        if kind := unsupported_format(data[:16]):
            raise BrokenImage(f"{kind} is not supported: convert it to JPEG, PNG or WebP") from error
        raise BrokenImage(f"{type(error).__name__}: {_short(error)}") from error


def decoded(image: ImageFile.ImageFile) -> Image.Image:
    """The opened image as `decode` returns it.

    Raises:
        BrokenImage: see `decode`. Damaged files raise other errors of Pillow, too.
    """
    short, long = sorted(image.size)
    if long > LONGEST * short:
        columns, rows = (256 * side // max(short, 1) for side in image.size)
        raise BrokenImage(
            f"too long and thin: {image.width} x {image.height} would become {columns} x {rows} pixels; crop it to at most "
            f"{LONGEST:,} times its shorter side"
        )
    return to_rgb(image)


def opened(data: bytes, use: Callable[[ImageFile.ImageFile], T]) -> T:
    """What ``use`` returns for the opened image, however large the text and profiles of a PNG. Raises what Pillow raises."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return use(image)
    except ValueError as error:
        if "MAX_TEXT" not in str(error):  # Pillow limits the memory for text and profiles, of which we use none
            raise
    with Image.open(io.BytesIO(_without_text(data)), formats=FORMATS) as image:
        return use(image)


_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")


def _without_text(png: bytes) -> bytes:
    """The PNG without its chunks of text and profiles."""
    kept, at = [png[:8]], 8
    while at < len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")  # length, type, content, checksum
        if png[at + 4 : at + 8] not in _TEXT_CHUNKS:
            kept.append(png[at:end])
        at = end
    return b"".join(kept)


# How files of formats that are not decoded here begin.
_MARKS = (
    (b"\xff\x0a", "JXL"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JXL"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"8BPS", "PSD"),
    (b"v/1\x01", "EXR"),
    (b"DDS ", "DDS"),
    (b"II\xbc", "JPEG XR"),
)
_AVIF = (b"avif", b"avis")
_HEIF = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")


def unsupported_format(head: bytes) -> str | None:
    """The format of an image that begins with these (at least 12) bytes, if it is one that is not decoded here."""
    if head[4:8] == b"ftyp":
        return "AVIF" if head[8:12] in _AVIF else "HEIC" if head[8:12] in _HEIF else None
    return next((name for mark, name in _MARKS if head.startswith(mark)), None)


def looks_like_image(head: bytes) -> bool:
    """Whether a file that begins with these (at least 12) bytes has the signature of a known image format."""
    return (
        head.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"II*\0", b"MM\0*"))
        or (head[:2] == b"BM" and head[6:10] == bytes(4))  # reserved; a list of paths can begin with BMW/
        or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
        or (head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace())
    )


def to_rgb(image: Image.Image) -> Image.Image:
    """The image as RGB with 8 bits per channel; grayscale, palette, CMYK and transparent images are converted.

    Unsigned integers of 12 or 16 bits are scaled from their full range, 0 to 4095 or 65535. Numbers of other types have no
    range that would be known without looking at all images: scaling them by a guess would clip some to black or white.

    Raises:
        BrokenImage: the pixels are signed, floating-point, or have more than 16 bits.
    """
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    _require_range(image)
    if image.mode.startswith("I"):
        image = _from_16_bits(image)
    return image.convert("RGB")


# Of TIFF.
_BITS, _COLOR, _SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO = 0
_KINDS = {2: "signed integers", 3: "floating-point numbers"}


def _tag(image: Image.Image, number: int) -> int:
    """A tag of a TIFF, of its first channel; -1 if there is none."""
    value = getattr(image, "tag_v2", {}).get(number, -1)
    return int(value[0] if isinstance(value, tuple) else value)


def _require_range(image: Image.Image) -> None:
    kind = _KINDS.get(_tag(image, _SAMPLE_FORMAT))
    if image.mode == "F":
        kind = kind or "floating-point numbers"
    elif image.mode == "I" and image.format not in ("PNG", "PPM"):  # those have 16 bits
        kind = kind or "32-bit integers"
    if kind is not None:
        raise BrokenImage(f"its pixels are {kind}, whose range is unknown: convert it to unsigned integers of 8 or 16 bits")


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Grayscale with 8 bits, of one with 12 or 16."""
    most = 4095 if _tag(image, _BITS) == 12 else 65535
    scaled = image.convert("I").point(lambda v: v / (most / 255)).convert("L")
    # Pillow itself inverts 8 bits only.
    return ImageOps.invert(scaled) if _tag(image, _COLOR) == _WHITE_IS_ZERO else scaled


def _short(error: Exception) -> str:
    # Pillow's message ends with the address of the buffer, which differs between runs.
    return str(error).split("<_io", 1)[0].strip() or "cannot be decoded"
