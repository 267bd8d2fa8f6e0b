"""Images with more than 8 bits per channel keep their content, or are broken with the reason; never black and white."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from worldsize.data.images.pillow import BrokenImage, decode, to_rgb

RAMP = np.linspace(0, 1, 64)[None].repeat(32, 0)  # (32, 64), 0 to 1 from left to right
UNSIGNED, SIGNED, FLOAT = 1, 2, 3


def tiff(data: bytes, bits: int, kind: int = UNSIGNED, white_is_zero: bool = False) -> bytes:
    """An uncompressed TIFF of 64 x 32 pixels with one channel."""
    tags = [(256, 64), (257, 32), (258, bits), (259, 1), (262, 0 if white_is_zero else 1), (273, 8), (277, 1), (278, 32)]
    tags += [(279, len(data)), (339, kind)]
    entries = b"".join(struct.pack("<HHII", tag, 4 if tag == 279 else 3, 1, value) for tag, value in tags)
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def ramp(kind: str, low: float = 0, high: float = 1) -> bytes:
    return (RAMP * (high - low) + low).astype(kind).tobytes()


def twelve_bits() -> bytes:
    first, second = (RAMP * 4095).astype(int).reshape(-1, 2).T
    return np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 1).astype(np.uint8).tobytes()


def saved(pixels: np.ndarray, form: str, **options: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, **options)
    return out.getvalue()


KEPT = {
    "TIFF, 16 bits": tiff(ramp("<u2", 0, 65535), 16),
    "TIFF, 16 bits, white is zero": tiff(ramp("<u2", 65535, 0), 16, white_is_zero=True),
    "TIFF, 12 bits": tiff(twelve_bits(), 12),
    "TIFF, 8 bits, white is zero": tiff(ramp("u1", 255, 0), 8, white_is_zero=True),
    "PNG, 16 bits": saved((RAMP * 65535).astype(np.uint16), "PNG"),
    "PGM, 16 bits": b"P5\n64 32\n65535\n" + ramp(">u2", 0, 65535),
    "PGM, 12 bits": b"P5\n64 32\n4095\n" + ramp(">u2", 0, 4095),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_ramp_stays_one(kind):
    pixels = np.asarray(decode(KEPT[kind])).astype(int)
    assert np.abs(pixels - (RAMP * 255)[..., None]).max() <= 1
    assert len(np.unique(pixels)) == 64 and (np.diff(pixels, axis=1) >= 0).all()


BROKEN = {
    "signed integers": [
        tiff(ramp("<i4", 0, 65535), 32, SIGNED),
        tiff(ramp("<i2", 0, 32767), 16, SIGNED),
        tiff(ramp("i1", -128, 127), 8, SIGNED),
        saved((RAMP * 65535).astype(np.int32), "TIFF", compression="tiff_lzw"),
    ],
    "32-bit integers": [tiff(ramp("<u4", 0, 2**32 - 1), 32)],
    "floating-point numbers": [
        tiff(ramp("<f4"), 32, FLOAT),
        tiff(ramp("<f4", -1024, 3071), 32, FLOAT),
        saved(RAMP.astype(np.float32), "TIFF", compression="tiff_deflate"),
        b"Pf\n64 32\n-1.0\n" + ramp("<f4"),
    ],
}


@pytest.mark.parametrize(("kind", "data"), [(kind, data) for kind, some in BROKEN.items() for data in some])
def test_numbers_without_a_known_range_are_broken_with_the_reason(kind, data):
    with pytest.raises(BrokenImage, match=f"^its pixels are {kind}, whose range is unknown: convert it to unsigned"):
        decode(data)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_so_are_images_that_pillow_opened(dtype):
    with pytest.raises(BrokenImage, match="whose range is unknown"):
        to_rgb(Image.fromarray(RAMP.astype(dtype)))


def test_images_of_16_bits_that_pillow_opened_are_scaled():
    pixels = np.asarray(to_rgb(Image.fromarray((RAMP * 65535).astype(np.uint16))))
    assert np.abs(pixels.astype(int) - (RAMP * 255)[..., None]).max() <= 1
