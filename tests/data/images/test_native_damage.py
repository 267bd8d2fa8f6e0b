"""The native decoder with unusual and damaged images, and with invalid arguments."""

from __future__ import annotations

import io
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jpegs import NATIVE, cut_natively, cut_with_pillow, cuts_of, encode, needs_native, scene, whole
from worldsize.data.images.pillow import BrokenImage, decode


def odd_images() -> dict[str, bytes]:
    pixels = scene(40, 50, 0)
    plain = encode(pixels)
    comment = plain[:2] + b"\xff\xfe\x00\x07hello"
    other: dict[str, bytes] = {}
    for kind in ("PNG", "GIF", "BMP", "WEBP", "TIFF"):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, kind)
        other[f"{kind} named .JPEG"] = out.getvalue()
    out = io.BytesIO()
    Image.fromarray(pixels).convert("CMYK").save(out, "JPEG")
    frame = plain.index(b"\xff\xc0")
    huge = plain[: frame + 5] + b"\xff\xdc\xff\xdc" + plain[frame + 9 :]
    return other | {
        "CMYK": out.getvalue(),
        "empty": b"",
        "one byte": b"\xff",
        "only start and end markers": b"\xff\xd8\xff\xd9",
        "text": b"These are not the pixels.\n" * 30,
        "zeros": bytes(1000),
        "truncated": plain[: len(plain) // 2],
        "no end": plain[:-2],
        "bytes after the end": plain + b"rest",
        "arithmetic coding": plain[: frame + 1] + b"\xc9" + plain[frame + 2 :],
        "lossless": plain[: frame + 1] + b"\xc3" + plain[frame + 2 :],
        "12 bits": plain[: frame + 4] + b"\x0c" + plain[frame + 5 :],
        "no height": plain[: frame + 5] + b"\0\0" + plain[frame + 7 :],
        "very large dimensions": huge,
        "two frames": plain[:frame] + plain[frame : frame + 19] + plain[frame:],
        "a segment beyond the end": plain[:2] + b"\xff\xe1\xff\xff" + plain[2:],
        "a segment shorter than its length": plain[:2] + b"\xff\xe1\0\1" + plain[2:],
        "followed by a second image": plain + plain,
        "no quantization tables": plain[:2] + plain[frame:],
        "extraneous bytes before a marker": comment + b"\0\0" + plain[2:],
        "truncated after the box, with an end marker": plain[: len(plain) * 3 // 4] + b"\xff\xc0\xff\xd9",
        "no scan": plain[: plain.index(b"\xff\xda")] + b"\xff\xd9",
    }


# These must be rejected by their headers alone.
UNSUPPORTED = ("CMYK", "empty", "truncated", "no end", "bytes after the end", "arithmetic coding", "12 bits", "two frames")


@needs_native
@pytest.mark.parametrize("name", odd_images())
def test_an_odd_image_is_left_to_pillow(name):
    data = odd_images()[name]
    good = encode(scene(40, 50, 1))
    cut = whole(40, 50, 32)
    done, out = cut_natively([good, data, good], [cut] * 3)
    assert done.tolist() == [True, False, True]
    if name in UNSUPPORTED:
        assert not NATIVE.headers([data])[2].any()
    assert not out[1].any()
    np.testing.assert_array_equal(out[0], cut_with_pillow(good, cut, False, 32))
    np.testing.assert_array_equal(out[2], out[0])


@needs_native
@pytest.mark.parametrize(
    "segment",
    [
        b"\xff\xe0\x00\x06JFIF",
        b"\xff\xe2\x00\x0eICC_PROFILE\0",
        b"\xff\xed\x00\x16Photoshop 3.0\x008BIM\3\xed",
        b"\xff\xee\x00\x08Adobe\0",
    ],
)
def test_segments_that_pillow_rejects_are_left_to_it(segment):
    data = encode(scene(40, 50, 0))
    data = data[:2] + segment + data[2:]
    with pytest.raises(BrokenImage):
        decode(data)
    assert not NATIVE.headers([data])[2].any()
    assert not cut_natively([data], [whole(40, 50, 32)])[0].any()


@needs_native
def test_ordinary_segments_are_decoded_natively():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(scene(40, 50, 0), exif=exif, icc_profile=bytes(range(256)) * 400, comment=b"hello", dpi=(72, 72))
    done, out = cut_natively([data], [whole(40, 50, 32)])
    assert done.all()
    np.testing.assert_array_equal(out[0], cut_with_pillow(data, whole(40, 50, 32), False, 32))


@needs_native
@pytest.mark.parametrize(
    "box",
    [
        (0, 0, 41, 50),
        (0, 0, 40, 51),
        (-1, 0, 10, 10),
        (0, -1, 10, 10),
        (39, 0, 2, 5),
        (0, 49, 5, 2),
        (0, 0, 0, 5),
        (0, 0, 5, -1),
    ],
)
def test_a_box_outside_the_image_is_refused(box):
    data = encode(scene(40, 50, 0))
    assert not cut_natively([data], [(*box, 32, 32, 0, 0)])[0].any()
    out = np.ones((1, 32, 32, 3), np.uint8)
    assert not NATIVE.raw([scene(40, 50, 0)], np.array([(*box, 32, 32, 0, 0)], np.int32), np.zeros(1, bool), 32, out).any()
    assert not out.any()


@needs_native
@pytest.mark.parametrize("grid", [(0, 5), (5, 0), (-3, 5), (65500, 65500)])
def test_an_impossible_grid_is_refused(grid):
    assert not cut_natively([encode(scene(40, 50, 0))], [(0, 0, 40, 50, *grid, 0, 0)])[0].any()


@needs_native
@pytest.mark.parametrize("progressive", [False, True])
@given(st.data())
def test_damage_gives_an_error_or_the_same_pixels_as_pillow(progressive, data):
    encoded = bytearray(encode(scene(60, 70, 1), progressive=progressive, subsampling="4:2:0", restart_marker_blocks=4))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(encoded) - 1) | st.integers(0, 700))
        if data.draw(st.integers(0, 9)) == 0:
            del encoded[position + 1 :]
        elif position < len(encoded):
            encoded[position] = data.draw(st.integers(0, 255) | st.sampled_from([0, 0xC0, 0xD9, 0xFF]))
    if data.draw(st.booleans()):
        encoded += b"\xff\xd9"
    heights, widths, plain = NATIVE.headers([bytes(encoded)])
    if not plain.all() or heights[0] * widths[0] > 10**6:
        return
    cut, size = data.draw(cuts_of(int(heights[0]), int(widths[0])))
    done, out = cut_natively([bytes(encoded)], [cut], size=size)
    if done.all():
        np.testing.assert_array_equal(out[0], cut_with_pillow(bytes(encoded), cut, False, size))
    else:
        assert not out.any()


def segments(data: bytes) -> list[bytes]:
    """The scans of a progressive JPEG, each with the tables before it."""
    starts = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    return [data[a:b] for a, b in itertools.pairwise([*starts, len(data) - 2])]


@needs_native
def test_an_image_of_more_than_500_scans_is_refused():
    data = encode(np.full((8, 8), 128, np.uint8), progressive=True)
    scans = segments(data)
    head = data[: data.index(b"\xff\xda")]
    # In a gray block, the last scan refines nothing. As a first scan of all bits (Ah = Al = 0), it may be repeated.
    repeated = scans[-1][:9] + b"\0" + scans[-1][10:]
    several, many = (head + b"".join(scans) + repeated * n + b"\xff\xd9" for n in (400, 600))
    assert cut_natively([several], [whole(8, 8, 8)], size=8)[0].all()
    assert not cut_natively([many], [whole(8, 8, 8)], size=8)[0].any()


@needs_native
def test_a_progressive_image_without_its_last_scans_is_left_to_pillow():
    data = encode(scene(64, 64, 0), progressive=True)
    scans = segments(data)
    short = data[: data.index(b"\xff\xda")] + b"".join(scans[:-2]) + b"\xff\xd9"
    decode(short)
    assert not cut_natively([short], [(20, 20, 9, 9, 16, 16, 0, 0)], size=16)[0].any()


def resident() -> int:
    """Resident memory of this process, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_native
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_damaged_images_do_not_leak_memory():
    data = [encode(scene(200, 250, i), progressive=i % 2 == 0) for i in range(4)]
    data += [one[: len(one) // 2] + b"\xff\xd9" for one in data] + [b"\xff\xd8\xff\xd9", encode(scene(9, 9, 0))[:-2]]
    cuts = [whole(200, 250, 32)] * len(data)
    for _ in range(20):
        done, _ = cut_natively(data, cuts)
    assert done.sum() == 4
    before = resident()
    for _ in range(300):
        cut_natively(data, cuts)
    assert resident() - before < 2 << 20
