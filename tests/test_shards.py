"""Shards on disk: what goes in comes out, others can read them, and whatever is wrong with them is said."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from packing import BROKEN, encode, files, noise, odd_folder, odd_pictures, packed
from trees import opened, put
from worldsize.data import open_dataset, shards
from worldsize.data.decode import BrokenPicture
from worldsize.data.shards import tar
from worldsize.data.shards.format import RECORD, Kind, Packed, Shard, Split, identity
from worldsize.data.shards.samples import ShardSamples
from worldsize.data.shards.store import Local, Remote
from worldsize.errors import DataError, StoreUnreachable, UserError
from worldsize.recipe import Data


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    return odd_folder(tmp_path_factory.mktemp("originals") / "root")


@pytest.fixture(scope="module")
def whole(originals, tmp_path_factory) -> Path:
    """Shards of the odd folder; not to be changed."""
    out = tmp_path_factory.mktemp("shards") / "out"
    packed(originals, out)
    return out


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """The same, to be damaged."""
    return shutil.copytree(whole, tmp_path / "copy")


def outcome(samples, index: int):
    try:
        return np.asarray(samples.picture(index)).tolist()
    except BrokenPicture as error:
        return str(error)


# What goes in comes out --------------------------------------------------------------------------------------------


def test_bytes_labels_paths_and_order_are_those_of_the_originals(originals, whole):
    before, after = opened(originals), shards.open_dataset(whole)
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


def test_there_are_several_shards(whole):
    assert len(shards.open_dataset(whole).train.shards) >= 3


def test_a_run_may_go_on_from_originals_to_shards(originals, whole):
    assert shards.open_dataset(whole).fingerprint == opened(originals).fingerprint


def test_the_index_knows_sizes_kinds_and_components(originals, whole):
    samples = shards.open_dataset(whole).train
    expected = {
        "plain.JPEG": (40, 60, Kind.JPEG, 3),
        "a png.JPEG": (30, 50, Kind.PNG, 3),
        "cmyk.JPEG": (40, 40, Kind.JPEG, 4),
        "grey.JPEG": (32, 64, Kind.JPEG, 1),
        "one pixel.JPEG": (1, 1, Kind.JPEG, 3),
        "palette.gif": (32, 32, Kind.OTHER, 1),
        "pixels.ppm": (24, 16, Kind.RAW, 3),
        **dict.fromkeys(BROKEN, (0, 0, Kind.BROKEN, 0)),
    }
    sizes = samples.sizes(np.arange(len(samples)))
    assert sizes.dtype == np.int32
    seen = 0
    for i, record in enumerate(samples.records):
        name = samples.path(i).split("/")[1]
        if name in expected:
            assert (*sizes[i].tolist(), Kind(record["kind"]), record["components"]) == expected[name]
            seen += 1
        elif record["kind"] != Kind.BROKEN:
            assert tuple(sizes[i]) == samples.picture(i).size[::-1]
    assert seen == len(expected)


def test_the_index_takes_at_most_64_bytes_a_sample(whole):
    samples = shards.open_dataset(whole).train
    assert (whole / "train.index").stat().st_size == len(samples) * RECORD.itemsize
    assert RECORD.itemsize <= 64
    assert RECORD.alignment == 1 or RECORD.itemsize % 8 == 0


def test_another_process_may_have_the_samples(whole):
    samples = shards.open_dataset(whole).train
    again = pickle.loads(pickle.dumps(samples))
    assert bytes(again.encoded(3)) == bytes(samples.encoded(3))


@pytest.mark.parametrize("name", ["folder", "imagenet", "cifar10"])
def test_every_data_set_of_files_opens_shards(whole, name):
    assert len(opened(whole, name).train) == len(odd_pictures()) + 5


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
        pytest.skip("this file system takes only UTF-8 names")
    assert os.fsencode(packed(root, tmp_path / "out").train.path(25)) == b"plain/\xff\xfe.jpg"


# Others can read them ----------------------------------------------------------------------------------------------


def test_tar_lists_and_unpacks_them(whole, originals, tmp_path):
    names = []
    for file in sorted(whole.glob("train-*.tar")):
        listed = subprocess.run(["tar", "-tf", file], capture_output=True, text=True, check=True)
        assert listed.stderr == ""
        names += listed.stdout.splitlines()
        unpacked = subprocess.run(["tar", "-xf", file, "-C", tmp_path], capture_output=True, text=True, check=True)
        assert unpacked.stderr == ""
    samples = opened(originals).train
    assert len(names) == 2 * len(samples)
    for i in range(len(samples)):
        picture, label = names[2 * i], names[2 * i + 1]
        assert picture.rsplit(".", 1)[0] == label.rsplit(".", 1)[0]
        assert tar.path_of(picture) == samples.path(i)
        assert (tmp_path / picture).read_bytes() == samples.encoded(i)
        assert (tmp_path / label).read_text() == str(samples.labels[i])


def test_extensions_tell_the_content(whole):
    names = [name for file in sorted(whole.glob("train-*.tar")) for name in tarfile.open(file).getnames()]
    found = {tar.path_of(n).split("/")[1]: n.rsplit(".", 1)[1] for n in names if not n.endswith(".cls")}
    assert found["a png.JPEG"] == "png"
    assert found["plain.JPEG"] == found["truncated.jpg"] == "jpg"
    assert found["text.jpg"] == found["empty.jpg"] == "bin"
    assert found["alpha.webp"] == "webp"


def test_webdataset_reads_them(whole, originals):
    urls = [str(file) for file in sorted(whole.glob("train-*.tar"))]
    samples = opened(originals).train
    read = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert len({sample["__key__"] for sample in read}) == len(read) == len(samples)
    for i, sample in enumerate(read):
        (extension,) = set(sample) - {"__key__", "__url__", "__local_path__", "cls"}
        assert sample[extension] == samples.encoded(i)
        assert int(sample["cls"]) == samples.labels[i]
        assert tar.path_of(f"{sample['__key__']}.{extension}") == samples.path(i)


def test_webdataset_decodes_raw_pixels(originals, tmp_path):
    root = tmp_path / "root"
    for i, split in enumerate(("train", "val")):
        for label in "ab":
            put(root / split / label / "1.jpg", encode(noise(50, 40, i), "JPEG"))
    samples = packed(root, tmp_path / "out", raw=32).train
    read = list(webdataset.WebDataset([str(tmp_path / "out" / "train-00000.tar")], shardshuffle=False).decode("rgb8"))
    for i, sample in enumerate(read):
        np.testing.assert_array_equal(sample["ppm"], samples.stored(i))
        assert sample["cls"] == i


# What is wrong with them is said -----------------------------------------------------------------------------------


def refused(folder: Path, kind: type[Exception] = DataError) -> str:
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        shards.open_dataset(folder)
    assert time.monotonic() - started < 5
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_flipped_bit_of_a_picture_is_found(copied):
    samples = shards.open_dataset(copied).train
    draw = random.Random(0)
    for index in range(len(samples)):
        record = samples.records[index]
        if record["length"] == 0:
            continue
        file = copied / f"train-{record['shard']:05d}.tar"
        data = bytearray(file.read_bytes())
        data[int(record["offset"]) + draw.randrange(int(record["length"]))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    damaged = shards.open_dataset(copied).train
    for index in range(len(damaged)):
        if damaged.records["length"][index]:
            with pytest.raises(BrokenPicture, match="checksum") as caught:
                damaged.picture(index)
            shard = f"train-{damaged.records['shard'][index]:05d}.tar"
            assert f"{shard} is damaged at byte {damaged.records['offset'][index]:,}" in str(caught.value)
            assert f"sample {index}" in str(caught.value)
            assert damaged.name(index) == f"{copied}/{shard}: {samples.path(index)}"


def test_a_flipped_bit_of_the_index_is_found_when_its_shard_is_read(copied):
    clean = (copied / "train.index").read_bytes()
    draw = random.Random(1)
    for _ in range(60):
        data = bytearray(clean)
        place = draw.randrange(len(data))
        data[place] ^= 1 << draw.randrange(8)
        (copied / "train.index").write_bytes(data)
        samples = shards.open_dataset(copied).train
        with pytest.raises(DataError, match=r"train\.index is damaged where it describes train-\d{5}\.tar"):
            samples.encoded(place // RECORD.itemsize)
        with pytest.raises(DataError):
            samples.check_index()


def test_a_damaged_header_costs_only_the_name(copied):
    samples = shards.open_dataset(copied).train
    file = copied / "train-00000.tar"
    data = bytearray(file.read_bytes())
    data[int(samples.records["offset"][0]) - 512 : int(samples.records["offset"][0])] = b"\xff" * 512
    file.write_bytes(data)
    assert shards.open_dataset(copied).train.name(0) == f"{copied}/train-00000.tar: sample 0"


@pytest.mark.parametrize("cut", [1, 20, RECORD.itemsize, 10_000])
def test_a_truncated_index_is_refused(copied, cut):
    data = (copied / "train.index").read_bytes()
    (copied / "train.index").write_bytes(data[: max(len(data) - cut, 0)])
    assert "train.index has" in refused(copied)


@pytest.mark.parametrize("name", ["train.index", "val.index", "train-00001.tar", "val-00000.tar"])
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    message = refused(copied)
    assert name in message
    assert "copy the shards again, or pack them again" in message


def test_a_truncated_shard_is_refused(copied):
    os.truncate(copied / "train-00001.tar", 5000)
    assert "train-00001.tar has 5,000 bytes, but should have" in refused(copied)


def test_shards_that_have_changed_places_are_refused(copied):
    one, two = copied / "train-00000.tar", copied / "train-00001.tar"
    length = max(one.stat().st_size, two.stat().st_size)
    first, second = one.read_bytes().ljust(length, b"\0"), two.read_bytes().ljust(length, b"\0")
    one.write_bytes(second[: one.stat().st_size])
    two.write_bytes(first[: two.stat().st_size])
    message = refused(copied)
    assert "train-00000.tar is not the shard that index.json means" in message
    assert "train-00001.tar" in message


def test_a_shard_of_another_pack_is_refused(copied, tmp_path):
    """Of the same names, labels and sizes, but other pixels."""
    root = odd_folder(tmp_path / "other")
    file = root / "train" / "plain" / "4.jpg"
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)
    packed(root, tmp_path / "out")
    last = max(copied.glob("train-*.tar")).name
    assert (copied / last).stat().st_size == (tmp_path / "out" / last).stat().st_size
    shutil.copy(tmp_path / "out" / last, copied / last)
    assert f"{last} is not the shard" in refused(copied)


def test_many_missing_shards_make_a_short_message(originals, tmp_path):
    packed(originals, tmp_path / "out", shard_bytes=3000)
    missing = list((tmp_path / "out").glob("train-*.tar"))
    for file in missing:
        file.unlink()
    message = refused(tmp_path / "out")
    assert message.count(".tar is missing") == 3
    assert f"and {len(missing) - 3} more" in message


def test_an_unfinished_pack_is_refused(copied):
    (copied / "index.json").unlink()
    assert "run `worldsize data pack` to its end" in refused(copied, UserError)
    assert shards.is_packed(copied)


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"format": "worldsize shards"}', "half", "binary"])
def test_a_damaged_page_is_refused(copied, damage):
    page = copied / "index.json"
    intact = page.read_bytes()
    page.write_bytes({"binary": b"\xff\x00\xfe", "half": intact[: len(intact) // 2]}.get(damage, damage.encode()))
    assert "index.json is damaged" in refused(copied)


@pytest.mark.parametrize(
    "change", [("samples", 3), ("samples", None), ("shards", [[1, 2]]), ("shards", "x"), ("shards", [])]
)
def test_a_page_that_contradicts_itself_is_refused(copied, change):
    page = json.loads((copied / "index.json").read_text())
    page["splits"]["train"][change[0]] = change[1]
    (copied / "index.json").write_text(json.dumps(page))
    assert "index.json is damaged" in refused(copied)


def test_a_later_version_is_refused(copied):
    page = json.loads((copied / "index.json").read_text()) | {"version": 2}
    (copied / "index.json").write_text(json.dumps(page))
    assert "is of version 2" in refused(copied, UserError)


def test_a_label_beyond_the_classes_is_refused(copied):
    """As by somebody who edits the page."""
    page = json.loads((copied / "index.json").read_text())
    page["classes"] = page["classes"][:1]
    (copied / "index.json").write_text(json.dumps(page))
    samples = shards.open_dataset(copied).train
    with pytest.raises(DataError, match="damaged"):
        samples.encoded(len(samples) - 1)


def test_a_shard_that_goes_away_later_breaks_its_pictures(copied):
    samples = shards.open_dataset(copied).train
    (copied / "train-00000.tar").unlink()
    with pytest.raises(BrokenPicture, match="No such file"):
        samples.encoded(0)
    assert samples.name(0) == f"{copied}/train-00000.tar: sample 0"


# Costs -------------------------------------------------------------------------------------------------------------


def test_more_shards_than_descriptors(whole):
    samples, expected = (shards.open_dataset(whole).train for _ in range(2))
    samples._store._most, before = 1, len(os.listdir("/proc/self/fd"))
    assert [samples.encoded(i) for i in range(len(samples))] == [expected.encoded(i) for i in range(len(samples))]
    assert len(os.listdir("/proc/self/fd")) - before == 1 + len(expected.shards)


def test_readers_that_share_one_descriptor_get_their_own_pictures(whole):
    """While each takes the other's file away."""
    samples = shards.open_dataset(whole).train
    expected = [samples.encoded(i) for i in range(len(samples))]
    samples._store._most = 1
    with ThreadPoolExecutor(8) as pool:
        chosen = np.random.default_rng(0).integers(0, len(samples), 4000).tolist()
        assert list(pool.map(samples.encoded, chosen)) == [expected[i] for i in chosen]


def test_a_shard_that_is_cut_off_while_it_is_read_breaks_its_pictures(copied):
    """Were it mapped, the process would be ended."""
    samples = shards.open_dataset(copied).train
    samples.encoded(0)
    os.truncate(copied / "train-00000.tar", 100)
    with pytest.raises(BrokenPicture, match="damaged at byte"):
        samples.encoded(0)


def synthetic(folder: Path, samples: int, count: int) -> None:
    """An index of so many samples, and shards to match in which there is nothing."""
    each = samples // count
    with open(folder / "train.index", "wb") as file:
        file.truncate(samples * RECORD.itemsize)
    part = identity("train", bytes(each * RECORD.itemsize))
    described = Split("0" * 64, (Shard(each, 100_000_000, part),) * count)
    for i in range(count):
        with open(folder / f"train-{i:05d}.tar", "wb") as file:
            file.write(tar.beginning(part))
            file.truncate(100_000_000)
    (folder / "val.index").write_bytes(b"")
    page = Packed(("a", "b"), {"train": described, "val": Split("0" * 64, ())}, {}, "0" * 64)
    (folder / "index.json").write_text(page.to_json())


def test_fifty_million_samples_open_within_a_second(tmp_path):
    synthetic(tmp_path, 50_000_000, 10_000)
    program = (
        "import sys, time, numpy as np; from worldsize.data import shards\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before, began = peak(), time.perf_counter()\n"
        "samples = shards.open_dataset(sys.argv[1]).train\n"
        "samples.sizes(np.arange(0, 50_000_000, 500_000)); samples.encoded(31_415_926)\n"
        "print(time.perf_counter() - began, (peak() - before) * 1024)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < 1
    for file in tmp_path.iterdir():
        file.unlink()  # pytest would keep them
    assert max(int(memory) for _, memory in runs) < 100e6


def test_remote_shards_are_read_too(whole):
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for name, data in files(whole).items():
        store.pipe_file(f"/bucket/shards/{name}", data)
    remote, local = shards.open_dataset("memory://bucket/shards").train, shards.open_dataset(whole).train
    for i in range(len(local)):
        assert bytes(remote.encoded(i)) == bytes(local.encoded(i))
        assert remote.path(i) == local.path(i)
    store.rm_file("/bucket/shards/train-00001.tar")
    with pytest.raises(DataError, match=r"train-00001\.tar is missing"):
        shards.open_dataset("memory://bucket/shards")


class Fault(Exception):
    """As stores' programs have of their own."""


class NoCredentialsError(Exception):
    """As botocore calls it."""


def test_a_store_that_cannot_be_reached_is_told_in_its_own_words(whole, monkeypatch):
    def fails(*_, **__):
        raise Fault("could not connect")

    remote = Remote(f"file://{whole}")
    monkeypatch.setattr(type(remote._files), "cat_file", fails)
    with pytest.raises(StoreUnreachable, match=r"index\.json cannot be read: Fault: could not connect"):
        shards.open_dataset(remote)
    monkeypatch.setattr(type(remote._files), "cat_file", lambda *_, **__: int("no number"))
    with pytest.raises(UserError, match=r"index\.json: invalid literal"):
        shards.open_dataset(remote)


def test_a_remote_read_that_fails_is_tried_again_for_a_while(whole, monkeypatch):
    samples, slept = shards.open_dataset(f"file://{whole}").train, []
    expected, cat = bytes(samples.encoded(0)), type(samples._store._files).cat_file
    monkeypatch.setattr("time.sleep", slept.append)

    def fails(times: int, error: Exception):
        left = iter(range(times))

        def cat_file(*arguments, **options):
            if next(left, None) is not None:
                raise error
            return cat(*arguments, **options)

        monkeypatch.setattr(type(samples._store._files), "cat_file", cat_file)

    fails(5, Fault("reset by peer"))
    assert bytes(samples.encoded(0)) == expected and slept == [1, 2, 4, 8, 8]
    fails(6, Fault("reset by peer"))
    with pytest.raises(StoreUnreachable, match=r"train-00000\.tar cannot be read: Fault: reset by peer"):
        samples.encoded(0)
    slept.clear()
    for error in (PermissionError("no"), NoCredentialsError("no")):
        fails(1, error)
        with pytest.raises(UserError, match=r"train-00000\.tar may not be read any more: .*no"):
            samples.encoded(0)
    fails(1, FileNotFoundError("no"))
    with pytest.raises(BrokenPicture, match="no"):
        samples.encoded(0)
    fails(1, Fault("reset by peer"))
    assert samples.name(0).endswith("sample 0") and slept == []
    fails(1, Fault("reset by peer"))
    assert not samples.path(0).startswith("sample") and slept == [1]  # packing writes it


def test_a_recipe_may_name_a_url(whole, tmp_path):
    remote, local = (open_dataset(Data(root=Path(root)), tmp_path) for root in (f"file://{whole}", whole))
    assert isinstance(remote.train._store, Remote)
    assert remote.fingerprint == local.fingerprint
    assert bytes(remote.val.encoded(0)) == bytes(local.val.encoded(0))
    with pytest.raises(UserError, match="teleport://bucket/shards"):
        open_dataset(Data(root=Path("teleport://bucket/shards")), tmp_path)


def test_a_local_store_is_what_a_path_opens(whole):
    assert isinstance(shards.open_dataset(whole).train, ShardSamples)
    assert isinstance(shards.open_dataset(whole).train._store, Local)


def test_a_page_of_somebody_else_makes_no_shards(tmp_path):
    put(tmp_path / "root" / "index.json", b"{}")
    with pytest.raises(UserError, match="not laid out for training"):
        opened(tmp_path / "root")
