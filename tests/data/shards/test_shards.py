"""Shards on disk: images and labels are preserved, and other tools can read them."""

from __future__ import annotations

import os
import pickle
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing import BROKEN, encode, noise, odd_folder, odd_images, packed
from trees import opened, put
from worldsize.data import shards
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.shards import tar
from worldsize.data.shards.format import RECORD, Encoding


def outcome(samples, index: int):
    try:
        return np.asarray(samples.image(index)).tolist()
    except BrokenImage as error:
        return str(error)


# Images and labels are preserved -------------------------------------------------------------------------------------


def test_bytes_labels_paths_and_order_equal_those_of_the_originals(originals, packed_root):
    before, after = opened(originals), shards.open_dataset(packed_root)
    assert after.classes == before.classes
    for old, new in ((before.train, after.train), (before.val, after.val)):
        assert len(new) == len(old)
        assert new.labels.tolist() == old.labels.tolist()
        assert new.labels.dtype == np.int32
        for i in range(len(old)):
            assert bytes(new.encoded(i)) == old.encoded(i)
            assert new.path(i) == old.path(i)
            assert new.length(i) == old.length(i)
            assert outcome(new, i) == outcome(old, i)


def test_there_are_several_shards(packed_root):
    assert len(shards.open_dataset(packed_root).train.shards) >= 3


def test_shards_have_the_fingerprint_of_the_originals(originals, packed_root):
    assert shards.open_dataset(packed_root).fingerprint == opened(originals).fingerprint


def test_the_index_knows_sizes_kinds_and_components(originals, packed_root):
    samples = shards.open_dataset(packed_root).train
    expected = {
        "plain.JPEG": (40, 60, Encoding.JPEG, 3),
        "a png.JPEG": (30, 50, Encoding.PNG, 3),
        "cmyk.JPEG": (40, 40, Encoding.JPEG, 4),
        "grey.JPEG": (32, 64, Encoding.JPEG, 1),
        "one pixel.JPEG": (1, 1, Encoding.JPEG, 3),
        "palette.gif": (32, 32, Encoding.OTHER, 1),
        "pixels.ppm": (24, 16, Encoding.RAW, 3),
        **dict.fromkeys(BROKEN, (0, 0, Encoding.BROKEN, 0)),
    }
    sizes = samples.sizes(np.arange(len(samples)))
    assert sizes.dtype == np.int32
    checked = 0
    for i, record in enumerate(samples.records):
        name = samples.path(i).split("/")[1]
        if name in expected:
            assert (*sizes[i].tolist(), Encoding(record["kind"]), record["components"]) == expected[name]
            checked += 1
        elif record["kind"] != Encoding.BROKEN:
            assert tuple(sizes[i]) == samples.image(i).size[::-1]
    assert checked == len(expected)


def test_the_index_uses_at_most_64_bytes_per_sample(packed_root):
    samples = shards.open_dataset(packed_root).train
    assert (packed_root / "train.index").stat().st_size == len(samples) * RECORD.itemsize
    assert RECORD.itemsize <= 64
    assert RECORD.alignment == 1 or RECORD.itemsize % 8 == 0


def test_samples_can_be_sent_to_another_process(packed_root):
    samples = shards.open_dataset(packed_root).train
    received = pickle.loads(pickle.dumps(samples))
    assert bytes(received.encoded(3)) == bytes(samples.encoded(3))


@pytest.mark.parametrize("name", ["folder", "imagenet", "cifar10"])
def test_every_dataset_layout_opens_shards(packed_root, name):
    assert len(opened(packed_root, name).train) == len(odd_images()) + 5


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300))
def test_a_key_names_one_path_and_has_no_dots(path):
    key = tar.key(path)
    assert "." not in key
    assert key.isascii()
    assert not key.startswith("__")
    assert tar.path_of(f"{key}.jpg") == path


@given(st.text("ab/%_é", min_size=1, max_size=300), st.integers(0, 2**32 - 1))
def test_a_header_can_be_read_back(path, length):
    blocks = tar.header(f"{tar.key(path.strip('/') or 'a')}.jpg", length)
    assert len(blocks) % 512 == 0
    assert tar.path_of(tar.member_name(blocks)) == (path.strip("/") or "a")


def test_a_name_that_is_not_utf8_is_kept(tmp_path):
    root = odd_folder(tmp_path / "root")
    try:
        Path(os.fsdecode(os.fsencode(root / "train" / "plain") + b"/\xff\xfe.jpg")).write_bytes(encode(noise(9, 9), "JPEG"))
    except OSError:
        pytest.skip("this file system only accepts UTF-8 names")
    assert os.fsencode(packed(root, tmp_path / "out").train.path(25)) == b"plain/\xff\xfe.jpg"


# Other tools can read them -------------------------------------------------------------------------------------------


def test_tar_lists_and_unpacks_them(packed_root, originals, tmp_path):
    names = []
    for file in sorted(packed_root.glob("train-*.tar")):
        listed = subprocess.run(["tar", "-tf", file], capture_output=True, text=True, check=True)
        assert listed.stderr == ""
        names += listed.stdout.splitlines()
        unpacked = subprocess.run(["tar", "-xf", file, "-C", tmp_path], capture_output=True, text=True, check=True)
        assert unpacked.stderr == ""
    samples = opened(originals).train
    assert len(names) == 2 * len(samples)
    for i in range(len(samples)):
        image, label = names[2 * i], names[2 * i + 1]
        assert image.rsplit(".", 1)[0] == label.rsplit(".", 1)[0]
        assert tar.path_of(image) == samples.path(i)
        assert (tmp_path / image).read_bytes() == samples.encoded(i)
        assert (tmp_path / label).read_text() == str(samples.labels[i])


def test_extensions_match_the_content(packed_root):
    names = [name for file in sorted(packed_root.glob("train-*.tar")) for name in tarfile.open(file).getnames()]
    found = {tar.path_of(n).split("/")[1]: n.rsplit(".", 1)[1] for n in names if not n.endswith(".cls")}
    assert found["a png.JPEG"] == "png"
    assert found["plain.JPEG"] == found["truncated.jpg"] == "jpg"
    assert found["text.jpg"] == found["empty.jpg"] == "bin"
    assert found["alpha.webp"] == "webp"


def test_webdataset_reads_them(packed_root, originals):
    webdataset = pytest.importorskip("webdataset")
    urls = [str(file) for file in sorted(packed_root.glob("train-*.tar"))]
    samples = opened(originals).train
    read = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert len({sample["__key__"] for sample in read}) == len(read) == len(samples)
    for i, sample in enumerate(read):
        (extension,) = set(sample) - {"__key__", "__url__", "__local_path__", "cls"}
        assert sample[extension] == samples.encoded(i)
        assert int(sample["cls"]) == samples.labels[i]
        assert tar.path_of(f"{sample['__key__']}.{extension}") == samples.path(i)


def test_webdataset_decodes_raw_pixels(originals, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    root = tmp_path / "root"
    for i, split in enumerate(("train", "val")):
        for label in "ab":
            put(root / split / label / "1.jpg", encode(noise(50, 40, i), "JPEG"))
    samples = packed(root, tmp_path / "out", raw=32).train
    read = list(webdataset.WebDataset([str(tmp_path / "out" / "train-00000.tar")], shardshuffle=False).decode("rgb8"))
    for i, sample in enumerate(read):
        np.testing.assert_array_equal(sample["ppm"], samples.stored(i))
        assert sample["cls"] == i
