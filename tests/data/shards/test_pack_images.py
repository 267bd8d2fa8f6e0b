"""How `worldsize data pack` stores each image: unchanged, smaller, as raw pixels, or as a broken image."""

from __future__ import annotations

import io
import os
import re

import numpy as np
import pytest
from PIL import Image

from packing import BROKEN, OPTIONS, encode, noise, packed
from trees import opened, put, two_classes
from worldsize.data import shards
from worldsize.data.images import native
from worldsize.data.images.crops import fit
from worldsize.data.images.pillow import decode
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.data.sampling.order import permute
from worldsize.data.shards.format import Encoding
from worldsize.data.shards.images import How, store
from worldsize.data.shards.pack import pack
from worldsize.errors import DataError

# Broken images -------------------------------------------------------------------------------------------------------


def test_too_many_broken_images_are_refused_and_a_larger_share_resumes(root, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"4 of 25 training images are broken.*--max-broken"):
        packed(root, out, max_broken=0.1)
    assert not (out / "index.json").exists()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    packed(root, out, max_broken=0.16)
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")} == before


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_broken_images_are_stored_unchanged_and_listed(root, tmp_path, capsys, how):
    samples = packed(root, tmp_path / "out", **how).train
    out = capsys.readouterr().out
    before = opened(root).train
    for i in range(len(before)):
        if before.path(i).split("/")[1] in BROKEN:
            assert samples.records["kind"][i] == Encoding.BROKEN
            assert bytes(samples.encoded(i)) == before.encoded(i)
            assert f"{samples.name(i)}: " in out
        else:
            assert samples.records["kind"][i] != Encoding.BROKEN


# Conversions ---------------------------------------------------------------------------------------------------------


def opened_bytes(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(
    ("size", "expected"), [((1000, 600), (500, 300)), ((333, 1000), (166, 500)), ((500, 400), (500, 400))]
)
def test_the_longer_side_is_reduced_and_never_enlarged(size, expected):
    stored = store(encode(noise(*size), "JPEG", quality=98, subsampling=0), How(reencode=90, max_side=500))
    assert (stored.width, stored.height) == opened_bytes(stored.data).size == expected
    assert stored.kind == Encoding.JPEG


def test_a_reencoded_image_is_pillows_jpeg_of_the_resized_image():
    original = encode(noise(800, 600), "PNG")
    stored = store(original, How(reencode=77, max_side=400))
    smaller = decode(original).resize((400, 300), Image.Resampling.BILINEAR)
    assert stored.data == encode(smaller, "JPEG", quality=77, subsampling=2)
    assert stored.extension == "jpg"


def test_a_jpeg_that_would_grow_stays_unchanged():
    small = encode(noise(80, 60), "JPEG", quality=40)
    assert store(small, How(reencode=95, max_side=500)).data == small
    large = encode(noise(80, 60), "JPEG", quality=100, subsampling=0)
    assert len(store(large, How(reencode=50)).data) < len(large)


@pytest.mark.parametrize(
    "original",
    [encode(noise(80, 60), "JPEG", quality=40, progressive=True), encode(noise(80, 60, 0, "CMYK"), "JPEG", quality=40)],
    ids=["progressive", "cmyk"],
)
def test_progressive_and_cmyk_jpegs_become_baseline_even_if_larger(original):
    stored = store(original, How(reencode=95))
    image = opened_bytes(stored.data)
    assert (image.mode, "progressive" in image.info, stored.components) == ("RGB", False, 3)


def test_an_image_too_large_for_jpeg_stays_unchanged():
    ribbon = encode(noise(70_000, 30), "PNG")
    assert store(ribbon, How(reencode=90)).data == ribbon
    assert store(ribbon, How(reencode=90, max_side=65_500)).width == 65_500


def test_grayscale_stays_grayscale():
    stored = store(encode(noise(300, 200, 0, "L"), "JPEG", quality=100), How(reencode=50))
    assert (opened_bytes(stored.data).mode, stored.components) == ("L", 1)


@pytest.mark.parametrize("size", [(400, 300), (100, 300), (64, 64), (20, 30)])
def test_raw_pixels_are_the_center_of_the_resized_image(size):
    original = encode(noise(*size), "PNG")
    stored = store(original, How(raw=64))
    assert (stored.kind, stored.extension, stored.width, stored.height) == (Encoding.RAW, "ppm", 64, 64)
    np.testing.assert_array_equal(np.asarray(opened_bytes(stored.data)), fit(decode(original), 64, 64))


def test_raw_samples_are_read_without_decoding(root, tmp_path):
    samples = packed(root, tmp_path / "out", raw=24).train
    raw = [i for i in range(len(samples)) if samples.records["kind"][i] == Encoding.RAW]
    assert len(raw) == len(samples) - len(BROKEN)
    for i in raw:
        pixels = samples.stored(i)
        assert pixels.shape == (24, 24, 3)
        assert not pixels.flags.writeable
        np.testing.assert_array_equal(np.asarray(samples.image(i)), pixels)
        np.testing.assert_array_equal(np.asarray(decode(bytes(samples.encoded(i)))), pixels)


@pytest.mark.skipif(native.load() is None, reason="needs the native reader")
def test_raw_samples_of_one_size_are_read_together(root, tmp_path):
    samples = packed(root, tmp_path / "out", raw=24).train
    raw = np.flatnonzero(samples.records["kind"] == Encoding.RAW)
    chosen = np.random.default_rng(0).permutation(raw)
    assert len({samples.shard_of(i) for i in chosen.tolist()}) > 2
    together = samples.several(chosen)
    assert isinstance(together, np.ndarray) and not together.flags.writeable
    one_by_one = [samples.stored(i) for i in chosen.tolist()]
    np.testing.assert_array_equal(together, one_by_one)
    samples._store._max_open = 128  # as if few files could be open at once
    few_files = samples.several(chosen)
    assert isinstance(few_files, list)
    np.testing.assert_array_equal(few_files, one_by_one)
    # One that was damaged since, or never was an image, leaves the others as they are.
    damage(tmp_path / "out", samples, chosen[3])
    for last, broken in ((chosen[-1], {3}), (np.flatnonzero(samples.records["kind"] != Encoding.RAW)[0], {3, len(raw) - 1})):
        found = samples.several(np.append(chosen[:-1], last))
        assert {i for i, one in enumerate(found) if not isinstance(one, np.ndarray)} == broken
        for i in set(range(len(raw) - 1)) - broken:
            np.testing.assert_array_equal(found[i], together[i])


def damage(folder, samples, index):
    """Change the last pixel of an image."""
    record = samples.records[index]
    with open(folder / f"train-{samples.shard_of(index):05d}.tar", "r+b") as file:
        file.seek(int(record["offset"]) + int(record["length"]) - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_an_image_too_thin_to_resize_is_broken(tmp_path):
    thread = encode(Image.new("L", (50_000, 1)), "PNG")
    assert store(thread, How(raw=256)).kind == Encoding.BROKEN
    assert store(thread, How()).kind == Encoding.BROKEN  # for training and evaluation it is broken too


def test_an_image_too_thin_to_resize_is_listed_with_its_reason(tmp_path, capsys):
    root = two_classes(tmp_path / "root")
    put(root / "train" / "cat" / "thread.png", encode(Image.new("L", (50_000, 1)), "PNG"))
    packed(root, tmp_path / "out", raw=256)
    assert re.search(r"broken +1, stored unchanged:\n.*thread\.png: .*\w", capsys.readouterr().out)


def test_images_in_memory_are_stored_raw(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    labels = (permute(0, 0, np.arange(30), 30) % 3).astype(np.int32)
    samples = ArraySamples("three", pixels, labels, ("a", "b.c", "d"))
    pack(Dataset(samples, samples), tmp_path / "out", How(), 20_000, 2, 0)
    train = shards.open_dataset(tmp_path / "out").train
    assert train.labels.tolist() == labels.tolist()
    for i in range(30):
        np.testing.assert_array_equal(train.stored(i), pixels[i])
    assert train.path(7) == f"{samples.classes[labels[7]]}/0000007"


def test_converted_images_have_another_fingerprint(root, tmp_path):
    fingerprints = {packed(root, tmp_path / str(i), **how).train.fingerprint for i, how in enumerate(OPTIONS)}
    assert len(fingerprints) == len(OPTIONS)
