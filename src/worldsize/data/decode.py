"""Bytes to RGB. The content decides the format, never the file's name."""

from __future__ import annotations

import io
import warnings

from PIL import Image

# What people keep in picture folders; a shorter list is a smaller surface for hostile files.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

# Large but allowed pictures, palettes with transparency and damaged EXIF are no news to the user. Set once, since
# filters belong to the process and decoding happens in threads.
warnings.filterwarnings("ignore", module=r"PIL\.")


class BrokenPicture(Exception):
    """These bytes cannot become a picture; the message says why."""


def decode(data: bytes) -> Image.Image:
    """The picture as RGB, 8 bits a channel; the first frame of an animation.

    Grey, palette, CMYK, 16-bit and transparent pictures are converted; transparency is dropped, as torchvision does.
    EXIF is ignored, its orientation too (only TIFFs are turned, by Pillow itself). Pillow's size limit against
    decompression bombs stays on: above 179 megapixels a picture is broken.

    Raises:
        BrokenPicture: not a picture, truncated, damaged, or too large.
    """
    if not data:
        raise BrokenPicture("empty file")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            return _to_rgb(picture)
    except Exception as error:  # a damaged file can raise nearly anything inside a decoder
        raise BrokenPicture(f"{type(error).__name__}: {_short(error)}") from error


def looks_like_picture(head: bytes) -> bool:
    """Whether a file that begins with these (at least 12) bytes claims to be a picture of a known format."""
    return (
        head.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*"))
        or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
        or (head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace())
    )


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PPM"):
        picture = picture.convert("I").point(lambda v: v / 257).convert("L")  # 0..65535 to 0..255
    return picture.convert("RGB")


def _short(error: Exception) -> str:
    # Pillow puts the address of the buffer into its message; it differs from run to run.
    return str(error).split("<_io", 1)[0].strip() or "cannot be decoded"
