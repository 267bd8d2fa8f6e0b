"""Decoding to RGB: all formats and modes, and all kinds of damage."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import threading
import tracemalloc
import warnings
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from worldsize.data.images.pillow import BrokenImage, decode, looks_like_image

FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"]
LOSSLESS = [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("PPM", {})]


def encode(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def colorful(width: int = 12, height: int = 8) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 20, y * 30, (x + y) * 12], axis=-1).astype(np.uint8))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_claiming(width: int, height: int) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(bytes(1000))) + png_chunk(b"IEND", b"")


def deep_gray(level: int, kind: str) -> bytes:
    if kind == "PGM":
        return b"P5\n4 4\n65535\n" + level.to_bytes(2, "big") * 16
    if kind == "TIFF, big-endian":
        tags = [(256, 3, 4), (257, 3, 4), (258, 3, 16), (259, 3, 1), (262, 3, 1), (273, 4, 110), (278, 3, 4), (279, 4, 32)]
        entries = b"".join(
            struct.pack(">HHI", tag, size, 1) + (struct.pack(">HH", value, 0) if size == 3 else struct.pack(">I", value))
            for tag, size, value in tags
        )
        head = struct.pack(">2sHIH", b"MM", 42, 8, len(tags)) + entries + bytes(4)
        return head + level.to_bytes(2, "big") * 16
    return encode(Image.fromarray(np.full((4, 4), level, np.uint16)), kind)


JPEG, PNG = encode(colorful(48, 32), "JPEG"), encode(colorful(48, 32), "PNG")


@pytest.mark.parametrize(("kind", "options"), LOSSLESS)
def test_lossless_formats_give_the_pixels_that_went_in(kind, options):
    image = decode(encode(colorful(), kind, **options))
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), np.asarray(colorful()))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF"])
def test_grayscale_images_have_three_equal_channels(kind):
    pixels = np.asarray(decode(encode(Image.new("L", (9, 7), 100), kind)))
    assert pixels.shape == (7, 9, 3)
    assert np.abs(pixels.astype(int) - 100).max() <= 1


def test_grayscale_with_alpha_loses_only_the_alpha():
    assert decode(encode(Image.new("LA", (3, 3), (100, 7)), "PNG")).getpixel((1, 1)) == (100, 100, 100)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF"])
def test_one_bit_images_become_black_and_white(kind):
    bits = Image.fromarray(np.array([[True, False], [False, True]]))
    np.testing.assert_array_equal(np.asarray(decode(encode(bits, kind)))[..., 0], [[255, 0], [0, 255]])


@pytest.mark.parametrize("transparency", [None, 0, bytes([0, 128, 255])])
def test_palettes_give_their_colors_whether_transparent_or_not(transparency):
    image = Image.new("P", (3, 1))
    image.putpalette([200, 10, 20, 30, 210, 40, 50, 60, 220])
    image.putdata([0, 1, 2])
    options = {} if transparency is None else {"transparency": transparency}
    pixels = np.asarray(decode(encode(image, "PNG", **options)))
    assert pixels.tolist() == [[[200, 10, 20], [30, 210, 40], [50, 60, 220]]]


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_rgba_loses_only_the_alpha(kind):
    image = Image.new("RGBA", (4, 4), (10, 200, 30, 128))
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    assert decode(encode(image, kind, **options)).getpixel((2, 2)) == (10, 200, 30)


def test_cmyk_jpegs_are_converted_as_pillow_does():
    data = encode(colorful(32, 32).convert("CMYK"), "JPEG", quality=95)
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.mode == "CMYK"
        expected = np.asarray(opened.convert("RGB"))
    pixels = np.asarray(decode(data))
    np.testing.assert_array_equal(pixels, expected)
    assert np.abs(pixels.astype(int) - np.asarray(colorful(32, 32))).mean() < 30


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "TIFF, big-endian", "PGM"])
def test_sixteen_bit_grayscale_is_scaled_not_clipped(kind):
    for level, expected in ((0, 0), (0x4040, 64), (0x8080, 128), (0xFFFF, 255)):
        assert decode(deep_gray(level, kind)).getpixel((0, 0)) == (expected,) * 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    red, green, blue = decode(data).getpixel((4, 4))
    assert red > 240
    assert green < 15
    assert blue < 15


def test_a_progressive_jpeg_equals_its_baseline_twin():
    progressive = encode(colorful(64, 64), "JPEG", quality=90, progressive=True)
    assert Image.open(io.BytesIO(progressive)).info.get("progressive")
    baseline = encode(colorful(64, 64), "JPEG", quality=90)
    difference = np.asarray(decode(progressive)).astype(int) - np.asarray(decode(baseline))
    assert np.abs(difference).max() <= 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_ignored(kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encode(colorful(12, 8), kind, exif=exif)).size == (12, 8)


def test_damaged_exif_is_ignored():
    data = encode(colorful(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(30))
    assert decode(data).size == (12, 8)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncated_image_is_broken(kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    data = encode(noise, kind)
    assert decode(data).size == (40, 40)
    for share in (0.01, 0.3, 0.7, 0.95):
        with pytest.raises(BrokenImage):
            decode(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"These are not the pixels.\n" * 100,
        b"<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        np.random.default_rng(0).bytes(5000),
        bytes(5000),
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xe0" + bytes(500),
    ],
    ids=["empty", "newline", "text", "svg", "postscript", "random", "zeros", "jpeg mark", "jpeg head"],
)
def test_bytes_that_are_not_an_image_are_broken(data):
    with pytest.raises(BrokenImage) as caught:
        decode(data)
    assert str(caught.value)


def test_a_reason_is_the_same_every_time():
    reasons = set()
    for _ in range(3):
        with pytest.raises(BrokenImage) as caught:
            decode(bytes(100))
        reasons.add(str(caught.value))
    assert len(reasons) == 1
    assert "0x" not in reasons.pop()


def test_a_decompression_bomb_is_broken_before_memory_is_allocated():
    bomb = png_claiming(30_000, 30_000)
    tracemalloc.start()
    resident_before = resident()
    with pytest.raises(BrokenImage, match="DecompressionBomb"):
        decode(bomb)
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert python_peak < 5e6
    assert resident() - resident_before < 50e6


def resident() -> int:
    """Peak memory of this process, bytes."""
    resource = pytest.importorskip("resource")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_png_whose_checksum_is_wrong_is_broken():
    data = bytearray(PNG)
    data[30] ^= 1
    with pytest.raises(BrokenImage):
        decode(bytes(data))


@pytest.mark.parametrize("data", [JPEG, PNG], ids=["JPEG", "PNG"])
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8), cut=st.integers(0, 20))
def test_damage_raises_nothing_but_broken_image(data, changes, cut):
    damaged = bytearray(data[: len(data) - cut])
    for position, value in changes:
        damaged[position % len(damaged)] = value
    with suppress(BrokenImage):
        assert decode(bytes(damaged)).mode == "RGB"


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0", b"P6\n"]),
)
def test_bytes_after_any_magic_raise_nothing_but_broken_image(body, magic):
    with suppress(BrokenImage):
        assert decode(magic + body).mode == "RGB"


def test_decoding_prints_no_warnings():
    image = Image.new("P", (3, 1))
    image.putpalette([200, 10, 20, 30, 210, 40, 50, 60, 220])
    for data in (
        encode(image, "PNG", transparency=bytes([0, 128, 255])),
        encode(colorful(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(30)),
    ):
        program = "import sys; from worldsize.data.images.pillow import decode; decode(sys.stdin.buffer.read())"
        done = subprocess.run([sys.executable, "-W", "default", "-c", program], input=data, capture_output=True, check=True)
        assert done.stderr == b""


def test_threads_that_decode_leave_the_warning_filters_alone():
    before = list(warnings.filters)
    with warnings.catch_warnings():
        threads = [threading.Thread(target=lambda: [decode(PNG) for _ in range(200)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = list(warnings.filters)
    assert after == before


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_the_head_of_every_format_looks_like_an_image(kind, mode):
    if (kind, mode) == ("WEBP", "1"):
        pytest.skip("Pillow cannot write it")
    assert looks_like_image(encode(colorful(40, 40).convert(mode), kind)[:16])


@pytest.mark.parametrize("number", range(1, 7))
def test_every_pnm_number_looks_like_an_image(number):
    assert looks_like_image(b"P%d\n4 4\n255\n    " % number)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xff",
        b"\xff\xd8",
        b"P",
        b"P6",
        b"P7\n4 4\n255\n",
        b"RIFF",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"# Images of me",
        b"Image 1 of 2..",
        b"\x00\x00\x00\x01Bud1\x00\x00\x10\x00",
        b"PK\x03\x04" + bytes(12),
        b"<!DOCTYPE html>",
        bytes(16),
    ],
)
def test_bytes_that_are_not_an_image_do_not_look_like_one(head):
    assert not looks_like_image(head)
