"""Damaged, incomplete or wrong shards: every defect is detected and reported."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from packing import odd_folder, packed
from trees import opened, put
from worldsize.data import shards
from worldsize.data.images.pillow import BrokenImage
from worldsize.data.shards.format import RECORD
from worldsize.errors import DataError, UserError


def refused(folder: Path, kind: type[Exception] = DataError) -> str:
    """The message of the refusal, which must come before any work that damaged numbers ask for."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        with pytest.raises(kind) as caught:
            shards.open_dataset(folder)
    finally:
        sys.setprofile(None)
    assert calls < 10_000
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_flipped_bit_of_an_image_is_found(copied):
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
            with pytest.raises(BrokenImage, match="checksum") as caught:
                damaged.image(index)
            shard = f"train-{damaged.records['shard'][index]:05d}.tar"
            assert f"{shard} is damaged at byte {damaged.records['offset'][index]:,}" in str(caught.value)
            assert f"sample {index}" in str(caught.value)
            assert damaged.name(index) == f"{copied}/{shard}: {samples.path(index)}"


def test_a_flipped_bit_of_the_index_is_found_when_its_shard_is_read(copied):
    clean = (copied / "train.index").read_bytes()
    draw = random.Random(1)
    for _ in range(60):
        data = bytearray(clean)
        position = draw.randrange(len(data))
        data[position] ^= 1 << draw.randrange(8)
        (copied / "train.index").write_bytes(data)
        samples = shards.open_dataset(copied).train
        with pytest.raises(DataError, match=r"train\.index is damaged in the part for train-\d{5}\.tar"):
            samples.encoded(position // RECORD.itemsize)
        with pytest.raises(DataError):
            samples.check_index()


def test_a_damaged_header_costs_only_the_name(copied):
    samples = shards.open_dataset(copied).train
    file = copied / "train-00000.tar"
    data = bytearray(file.read_bytes())
    data[int(samples.records["offset"][0]) - 512 : int(samples.records["offset"][0])] = b"\xff" * 512
    file.write_bytes(data)
    assert shards.open_dataset(copied).train.name(0) == f"{copied}/train-00000.tar: sample 0"


@pytest.mark.parametrize("removed", [1, 20, RECORD.itemsize, 10_000])
def test_a_truncated_index_is_refused(copied, removed):
    data = (copied / "train.index").read_bytes()
    (copied / "train.index").write_bytes(data[: max(len(data) - removed, 0)])
    assert "train.index has" in refused(copied)


@pytest.mark.parametrize("name", ["train.index", "val.index", "train-00001.tar", "val-00000.tar"])
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    message = refused(copied)
    assert name in message
    assert "copy the shards again, or pack them again" in message


def test_a_truncated_shard_is_refused(copied):
    os.truncate(copied / "train-00001.tar", 5000)
    assert "train-00001.tar has 5,000 bytes instead of" in refused(copied)


def test_swapped_shards_are_refused(copied):
    one, two = copied / "train-00000.tar", copied / "train-00001.tar"
    length = max(one.stat().st_size, two.stat().st_size)
    first, second = one.read_bytes().ljust(length, b"\0"), two.read_bytes().ljust(length, b"\0")
    one.write_bytes(second[: one.stat().st_size])
    two.write_bytes(first[: two.stat().st_size])
    message = refused(copied)
    assert "train-00000.tar is not the shard that index.json describes" in message
    assert "train-00001.tar" in message


def test_a_shard_of_another_dataset_is_refused(copied, tmp_path):
    """With the same names, labels and sizes, but different pixels."""
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


def test_an_incomplete_pack_is_refused(copied):
    (copied / "index.json").unlink()
    assert "run `worldsize data pack` until it completes" in refused(copied, UserError)
    assert shards.is_packed(copied)


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"format": "worldsize shards"}', "half", "binary"])
def test_a_damaged_index_json_is_refused(copied, damage):
    file = copied / "index.json"
    intact = file.read_bytes()
    file.write_bytes({"binary": b"\xff\x00\xfe", "half": intact[: len(intact) // 2]}.get(damage, damage.encode()))
    assert "index.json is damaged" in refused(copied)


@pytest.mark.parametrize(
    "change", [("samples", 3), ("samples", None), ("shards", [[1, 2]]), ("shards", "x"), ("shards", [])]
)
def test_an_inconsistent_index_json_is_refused(copied, change):
    content = json.loads((copied / "index.json").read_text())
    content["splits"]["train"][change[0]] = change[1]
    (copied / "index.json").write_text(json.dumps(content))
    assert "index.json is damaged" in refused(copied)


def test_a_later_version_is_refused(copied):
    content = json.loads((copied / "index.json").read_text()) | {"version": 2}
    (copied / "index.json").write_text(json.dumps(content))
    assert "has format version 2" in refused(copied, UserError)


def test_a_label_beyond_the_classes_is_refused(copied):
    """As after an edit of index.json by hand."""
    content = json.loads((copied / "index.json").read_text())
    content["classes"] = content["classes"][:1]
    (copied / "index.json").write_text(json.dumps(content))
    samples = shards.open_dataset(copied).train
    with pytest.raises(DataError, match="damaged"):
        samples.encoded(len(samples) - 1)


def test_a_shard_that_is_removed_later_breaks_its_images(copied):
    samples = shards.open_dataset(copied).train
    (copied / "train-00000.tar").unlink()
    with pytest.raises(BrokenImage, match="No such file"):
        samples.encoded(0)
    assert samples.name(0) == f"{copied}/train-00000.tar: sample 0"


def test_an_unrelated_index_json_is_not_taken_for_shards(tmp_path):
    put(tmp_path / "root" / "index.json", b"{}")
    with pytest.raises(UserError, match="does not have the expected layout"):
        opened(tmp_path / "root")


@pytest.mark.parametrize("name", ["train-00000.tar", "train.index", "index.json"])
def test_a_fifo_among_the_shards_is_refused_at_once(copied, name):
    (copied / name).unlink()
    os.mkfifo(copied / name)
    # An open for reading would block until somebody writes, so the check runs in a process that can be ended.
    program = f"from worldsize.data import shards; shards.open_dataset(__import__('pathlib').Path({str(copied)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert name in done.stderr.splitlines()[-1]
