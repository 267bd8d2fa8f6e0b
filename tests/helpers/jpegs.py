"""Images and cuts for the tests of the native decoder, and Pillow's result for them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image, ImageFile

from worldsize.data.images import native
from worldsize.data.images.pillow import decode

# Pillow's encoder fails if its buffer is too small, which its estimate for noise can be.
ImageFile.MAXBLOCK = 1 << 22

NATIVE = native.load()
needs_native = pytest.mark.skipif(NATIVE is None, reason=f"no native decoder: {native.reason_missing()}")
SAMPLING = ["4:4:4", "4:2:2", "4:2:0"]


def encode(pixels: np.ndarray, **options) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", **options)
    return out.getvalue()


def scene(height: int, width: int, seed: int, rough: float = 0.3) -> np.ndarray:
    """An image with smooth and rough parts, uint8 (height, width, 3)."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 9 + 2, width // 9 + 2, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), float)
    noise = rng.integers(0, 256, (height, width, 3))
    return (smooth + rough * (noise - smooth) * (noise > 128)).clip(0, 255).astype(np.uint8)


def cut_with_pillow(data: bytes, cut, flip: bool, size: int, bicubic: bool = False) -> np.ndarray:
    top, left, height, width, rows, columns, y, x = (int(v) for v in cut)
    part = decode(data).crop((left, top, left + width, top + height))
    resampling = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    pixels = np.asarray(part.resize((columns, rows), resampling).crop((x, y, x + size, y + size)))
    return pixels[:, ::-1] if flip else pixels


def cut_natively(data: list[bytes], cuts, flips=None, size: int = 32, **options) -> tuple[np.ndarray, np.ndarray]:
    assert NATIVE is not None
    cuts = np.array(cuts, np.int32).reshape(len(data), 8)
    flips = np.zeros(len(data), bool) if flips is None else np.array(flips, bool)
    out = np.full((len(data), size, size, 3), 77, np.uint8)
    return NATIVE.cut(data, cuts, flips, size, out, **options), out


def whole(height: int, width: int, size: int) -> tuple[int, ...]:
    return (0, 0, height, width, size, size, 0, 0)


@st.composite
def images(draw) -> tuple[bytes, int, int]:
    height, width = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    pixels = scene(height, width, draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 0.3, 1.0])))
    options: dict = {"quality": draw(st.integers(1, 100)), "progressive": draw(st.booleans())}
    if draw(st.booleans()):
        options["restart_marker_blocks"] = draw(st.integers(1, 20))
    if draw(st.integers(0, 5)) == 0:
        return encode(pixels[..., 0], **options), height, width
    return encode(pixels, subsampling=draw(st.sampled_from(SAMPLING)), **options), height, width


@st.composite
def cuts_of(draw, height: int, width: int) -> tuple[tuple[int, ...], int]:
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    box = (top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))
    size = draw(st.integers(1, 90))
    if draw(st.booleans()):
        return (*box, size, size, 0, 0), size
    grid = (draw(st.integers(1, 120)), draw(st.integers(1, 120)))
    return (*box, *grid, draw(st.integers(-40, 120)), draw(st.integers(-40, 120))), size
