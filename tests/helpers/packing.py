"""Folders of images of many kinds, and shards of them."""

from __future__ import annotations

import io
import os
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from PIL import Image

from trees import opened, put
from worldsize.data.samples import Dataset
from worldsize.data.shards import open_dataset
from worldsize.data.shards.images import How
from worldsize.data.shards.pack import pack


def encode(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height)).convert(mode)


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its data does not have."""
    return colour_png(width, height, bytes(1000))


def colour_png(width: int, height: int, rows: bytes, bits: int = 8) -> bytes:
    """A PNG with three channels, also in variants that Pillow cannot write."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def odd_images() -> dict[str, bytes]:
    """Images by file name: all formats, misleading extensions, and all kinds of damage."""
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


# Options of `How`.
OPTIONS = [{}, {"reencode": 80, "max_side": 40}, {"raw": 24}]
BROKEN = ("truncated.jpg", "empty.jpg", "text.jpg", "bomb.jpg")


def odd_folder(root: Path) -> Path:
    """A dataset of two classes, one of them with dots and underscores in its name."""
    for name, data in odd_images().items():
        put(root / "train" / "__odd.ones__" / name, data)
    for i in range(5):
        put(root / "train" / "plain" / f"{i}.jpg", encode(noise(40 + i, 30, i), "JPEG"))
    for label in ("__odd.ones__", "plain"):
        put(root / "val" / label / "1.png", encode(noise(30, 30), "PNG"))
    return root


def packed(root: Path, out: Path, shard_bytes: int = 20_000, workers: int = 2, max_broken: float = 1.0, **how) -> Dataset:
    """Pack the dataset in ``root``, and open its shards."""
    pack(opened(root), out, How(**how), shard_bytes, workers, max_broken)
    return open_dataset(out)


def files(folder: Path) -> dict[str, bytes]:
    """The content of all files in a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What `special_files` makes, and the reason that is reported for each.
SPECIAL = {
    "dangling.jpg": "is a dangling symbolic link",
    "device.jpg": "is a device, not a regular file",
    "fifo.jpg": "is a FIFO, not a regular file",
    "loop.jpg": "is a dangling symbolic link",
    "socket.jpg": "is a socket, not a regular file",
}


@contextmanager
def special_files(folder: Path) -> Iterator[None]:
    """Make files that are not regular files. A read that blocks on the FIFO ends after 20 seconds, as of an empty file."""
    (folder / "dangling.jpg").symlink_to("nowhere")
    (folder / "loop.jpg").symlink_to("loop.jpg")
    (folder / "device.jpg").symlink_to(os.devnull)
    os.mkfifo(folder / "fifo.jpg")
    descriptor = os.open(folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{descriptor}/socket.jpg")  # the path of a socket has at most 107 bytes
    os.close(descriptor)
    done = threading.Event()

    def unblock() -> None:
        pause = 20.0
        while not done.wait(pause):
            with suppress(OSError):  # no reader
                os.close(os.open(folder / "fifo.jpg", os.O_WRONLY | os.O_NONBLOCK))
            pause = 0.1

    guard = threading.Thread(target=unblock)
    guard.start()
    try:
        yield
    finally:
        done.set()
        guard.join()
