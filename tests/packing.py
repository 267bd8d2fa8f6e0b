"""Folders of pictures of many kinds, and shards of them, for the tests of shards."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from trees import opened, put
from worldsize.data.samples import Dataset
from worldsize.data.shards import open_dataset
from worldsize.data.shards.pack import pack
from worldsize.data.shards.pictures import How


def encode(picture: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height)).convert(mode)


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header promises much."""
    return colour_png(width, height, bytes(1000))


def colour_png(width: int, height: int, rows: bytes, bits: int = 8) -> bytes:
    """A PNG of three channels, as also Pillow does not write them."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def odd_pictures() -> dict[str, bytes]:
    """By name: every kind of picture that people keep under a name that says JPEG, and every kind of damage."""
    plain = encode(noise(60, 40), "JPEG", quality=90)
    return {
        "plain.JPEG": plain,
        "a png.JPEG": encode(noise(50, 30, 1), "PNG"),
        "cmyk.JPEG": encode(noise(40, 40, 2, "CMYK"), "JPEG"),
        "grey.JPEG": encode(noise(64, 32, 3, "L"), "JPEG"),
        "progressive.JPEG": encode(noise(70, 50, 4), "JPEG", progressive=True),
        "exif.JPEG": encode(noise(48, 32, 5), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(30)),
        "one pixel.JPEG": encode(Image.new("RGB", (1, 1), "red"), "JPEG"),
        "sixteen bit.png": encode(Image.fromarray(np.arange(256, dtype=np.uint16).reshape(16, 16) * 200), "PNG"),
        "palette.gif": encode(noise(32, 32, 6).convert("P"), "GIF"),
        "alpha.webp": encode(Image.new("RGBA", (20, 20), (90, 50, 10, 100)), "WEBP"),
        "no.dots.in.keys.tiff": encode(noise(24, 24, 8), "TIFF"),
        "bitmap.bmp": encode(noise(16, 24, 9), "BMP"),
        "pixels.ppm": encode(noise(16, 24, 10), "PPM"),
        "__two underscores__.jpg": plain,
        "äöü \u2603 %41.jpg": plain,
        "long" * 40 + ".jpg": plain,
        "truncated.jpg": plain[: len(plain) // 2],
        "empty.jpg": b"",
        "text.jpg": b"These are not the pixels.\n" * 30,
        "bomb.jpg": png_claiming(30_000, 30_000),
    }


# Ways to pack.
OPTIONS = [{}, {"reencode": 80, "max_side": 40}, {"raw": 24}]
BROKEN = ("truncated.jpg", "empty.jpg", "text.jpg", "bomb.jpg")


def odd_folder(root: Path) -> Path:
    """A data set of two classes, one of them with dots and underscores in its name."""
    for name, data in odd_pictures().items():
        put(root / "train" / "__odd.ones__" / name, data)
    for i in range(5):
        put(root / "train" / "plain" / f"{i}.jpg", encode(noise(40 + i, 30, i), "JPEG"))
    for label in ("__odd.ones__", "plain"):
        put(root / "val" / label / "1.png", encode(noise(30, 30), "PNG"))
    return root


def packed(root: Path, out: Path, shard_bytes: int = 20_000, workers: int = 2, max_broken: float = 1.0, **how) -> Dataset:
    """The shards of the data set in ``root``, opened."""
    pack(opened(root), out, How(**how), shard_bytes, workers, max_broken)
    return open_dataset(out)


def files(folder: Path) -> dict[str, bytes]:
    """All that is in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
