"""Shards that are damaged, incomplete or not what they should be: whatever is wrong with them is said."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from packing import odd_folder, packed
from trees import opened, put
from worldsize.data import shards
from worldsize.data.decode import BrokenPicture
from worldsize.data.shards.format import RECORD
from worldsize.errors import DataError, UserError


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


def test_a_page_of_somebody_else_makes_no_shards(tmp_path):
    put(tmp_path / "root" / "index.json", b"{}")
    with pytest.raises(UserError, match="not laid out for training"):
        opened(tmp_path / "root")
