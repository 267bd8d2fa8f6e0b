"""Verification, training, evaluation and packing agree about every image: usable by all, or broken for all."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from packing import encode, noise
from trees import opened, put, two_classes
from worldsize.data.images import native
from worldsize.data.images.crops import CenterCrop, CornerCrop, PadCrop, RandomResizedCrop
from worldsize.data.images.pillow import LONGEST, BrokenImage, decode
from worldsize.data.loading.prepare import Preparation
from worldsize.data.shards.format import Encoding
from worldsize.data.shards.images import How, examine, store
from worldsize.data.survey import info

CROPS = (
    RandomResizedCrop(32, True, (0.08, 1.0), (3 / 4, 4 / 3)),
    CenterCrop(224, False, 256),
    CenterCrop(480, False, 512),
    PadCrop(48, True, 4),
    CornerCrop(90, 100, False, True),
)
HOWS = (How(), How(reencode=90), How(reencode=90, max_side=100), How(raw=512))


def png(**text: str) -> bytes:
    """A small PNG with a chunk of text for each kind, after the pixels of `plain`."""
    chunks = PngImagePlugin.PngInfo()
    for kind, value in text.items():
        match kind:
            case "tEXt":
                chunks.add_text("k", value)
            case "zTXt":
                chunks.add_text("k", value, zip=True)
            case "iTXt":
                chunks.add_itxt("k", value, zip=True)
    out = io.BytesIO()
    noise(30, 20).save(out, "PNG", pnginfo=chunks)
    return out.getvalue()


def profile() -> bytes:
    return encode(noise(30, 20), "PNG", icc_profile=np.random.default_rng(0).bytes(2_000_000))


def late() -> bytes:
    """The text comes after the pixels."""
    kind, content = b"zTXt", b"k\0\0" + zlib.compress(b"x" * 2_000_000)
    chunk = len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
    data = png()
    return data[:-12] + chunk + data[-12:]


WHOLE = encode(noise(64, 32), "JPEG")
LARGE = "x" * 2_000_000
METADATA = {"tEXt": png(tEXt=LARGE), "zTXt": png(zTXt=LARGE), "iTXt": png(iTXt=LARGE), "iCCP": profile(), "late": late()}
IMAGES = {
    **METADATA,
    "long": encode(Image.new("RGB", (30_000, 2), (90, 120, 40)), "JPEG"),
    "tall": encode(Image.new("RGB", (2, 30_000), (90, 120, 40)), "PNG"),
    "just too long": encode(Image.new("RGB", (2 * LONGEST + 1, 2)), "JPEG"),
    "just long enough": encode(Image.new("RGB", (2 * LONGEST, 2)), "JPEG"),
    "garbage after": WHOLE + b"xyz" * 100,
    "no end marker": WHOLE[:-2],
    "last bytes cut": WHOLE[:-20],
    "newline before": b"\n" + WHOLE,
    "text": b"<!doctype html><title>404</title>",
    "empty": b"",
    "text and damage": METADATA["zTXt"][:-40] + b"?" + METADATA["zTXt"][-39:],
    "text and cut": METADATA["zTXt"][:-400],
}
USABLE = {*METADATA, "just long enough", "garbage after"}


@pytest.fixture(scope="module", params=["native", "pillow"])
def preparation(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pillow":
            patch.setattr(native, "load", lambda: None)
        elif native.load() is None:
            pytest.skip("the native library is not built")
        yield Preparation()


@pytest.mark.parametrize("name", IMAGES)
def test_all_agree(preparation, name):
    data = IMAGES[name]
    reasons = {"verify": examine(data).reason}
    for crop in CROPS:
        out = np.empty((1, crop.size, crop.size, 3), np.uint8)
        reasons[f"{type(crop).__name__} {crop.size}"] = preparation.fill(crop, [data], np.full((1, crop.draws), 0.5), out)[0]
    broken = {what for what, reason in reasons.items() if reason is not None}
    broken |= {str(how) for how in HOWS if store(data, how).kind == Encoding.BROKEN}
    assert len(broken) in (0, 1 + len(CROPS) + len(HOWS)), reasons
    assert bool(broken) != (name in USABLE), reasons


@pytest.mark.parametrize("kind", METADATA)
def test_text_and_profiles_do_not_change_the_pixels(kind):
    np.testing.assert_array_equal(np.asarray(decode(METADATA[kind])), np.asarray(noise(30, 20)))
    facts = examine(METADATA[kind])
    assert (facts.format, facts.mode, facts.size) == ("PNG", "RGB", (30, 20))


def test_large_text_hides_no_damage():
    for name in ("text and damage", "text and cut"):
        with pytest.raises(BrokenImage):
            decode(IMAGES[name])


def test_info_reads_the_size_of_an_image_with_much_text(tmp_path: Path):
    root = two_classes(tmp_path / "root")
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            put(root / split / name / "text.png", METADATA["zTXt"])
    found = info.dimensions(opened(root).train, 0)
    assert found.kinds["PNG color"] == 5 and (20, 30) in {tuple(size) for size in found.sizes.tolist()}
