"""Reading archives, and a collection of layouts as people publish them."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from layout_trees import labels, refusal, splits
from paths import SHARED
from trees import image_bytes, put
from worldsize.data import layouts
from worldsize.data.layouts import packed
from worldsize.errors import DataError, UserError

COLLECTION = SHARED / "layouts"
EXPECTED = json.loads((COLLECTION / "expected.json").read_text()) if COLLECTION.is_dir() else {}
REFUSE = json.loads((COLLECTION / "refuse.json").read_text()) if COLLECTION.is_dir() else {}

# Images inside other files, which --unpack writes to files.
PACKED = {"hf_parquet", "wds_clip_benchmark"}
needs_collection = pytest.mark.skipif(not COLLECTION.is_dir(), reason=f"{COLLECTION} is not there")


# Archives -----------------------------------------------------------------------------------------------------------------


def archive(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as opened:
            for name, data in files.items():
                opened.writestr(name, data)
        return
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_shards_of_webdataset(tmp_path):
    for split, shards in (("train", 2), ("test", 1)):
        for shard in range(shards):
            files: dict[str, bytes] = {}
            for i in range(4):
                files |= {f"s{i}.cls": b"%d" % (i % 2), f"s{i}.webp": image_bytes(f"#{shard}{i}{shards}000", "WEBP")}
            archive(tmp_path / "in" / split / f"{shard}.tar", files)
    (tmp_path / "in" / "classnames.txt").write_text("traffic light\nbird\n")
    packed.unpack(tmp_path / "in", tmp_path / "out")
    found = layouts.read(tmp_path / "out")
    assert labels(found)["train/part_1/s3.webp"] == "bird" and found.classes == ["bird", "traffic light"]
    assert sorted(filter(None, splits(found).values())) == ["train"] * 8 + ["val"] * 4


def test_a_zip_of_class_folders(tmp_path):
    archive(
        tmp_path / "in" / "pets.zip", {f"{kind}/{kind}{i}.png": image_bytes() for kind in ("cat", "dog") for i in range(2)}
    )
    packed.unpack(tmp_path / "in", tmp_path / "out")
    assert layouts.read(tmp_path / "out").classes == ["cat", "dog"]


def test_parquet_with_names_of_classes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = {"info": {"features": {"tags": {"feature": {"names": ["ant", "bee"], "_type": "ClassLabel"}}}}}
    (tmp_path / "in").mkdir()
    for split in ("train", "validation"):
        rows = {
            "image": [{"bytes": image_bytes(f"#00000{i}"), "path": None} for i in range(4)],
            "tags": [[0], [1, 0], [1], []],
        }
        table = pyarrow.table(rows).replace_schema_metadata({"huggingface": json.dumps(names)})
        parquet.write_table(table, tmp_path / "in" / f"{split}-00000-of-00001.parquet")
    packed.unpack(tmp_path / "in", tmp_path / "out")
    found = layouts.read(tmp_path / "out")
    assert [label for file, label in labels(found).items() if file.startswith("train")] == ["ant", "ant+bee", "bee", ""]
    assert set(splits(found).values()) == {"train", "val"}


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("a.tar", b"x", DataError, "a.tar is damaged"),
        ("a.zip", b"x", DataError, "a.zip is damaged"),
        ("a.png", image_bytes(), UserError, "has image files already"),
        ("a.txt", b"x", UserError, "has no archives"),
        ("a.parquet", b"x", DataError, "a.parquet is damaged"),
    ],
)
def test_what_cannot_be_unpacked(tmp_path, name, data, error, message):
    put(tmp_path / "in" / name, data)
    with pytest.raises(error, match=message):
        packed.unpack(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_tar_file_that_ends_after_an_image_is_not_unpacked(tmp_path):
    """tarfile itself takes that for its end."""
    archive(tmp_path / "in" / "a.tar", {"a/1.png": image_bytes(), "b/2.png": image_bytes()})
    whole = (tmp_path / "in" / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "in" / "a.tar") as tar:
        second = tar.getmembers()[1].offset
    (tmp_path / "in" / "a.tar").write_bytes(whole[:second])
    with pytest.raises(DataError, match=r"a\.tar is damaged: truncated"):
        packed.unpack(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_an_archive_cannot_write_elsewhere(tmp_path, suffix):
    archive(tmp_path / "in" / f"a.{suffix}", {"../../evil.png": image_bytes()})
    with pytest.raises(DataError, match=r"names a file outside of its folder: \.\./\.\./evil\.png"):
        packed.unpack(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="already exists"):
        packed.unpack(tmp_path / "in", tmp_path / "out")


# The collection -----------------------------------------------------------------------------------------------------------


def unpacked(image: dict[str, str]) -> str:
    """The path of an image, also if it is in another file."""
    if "member" not in image:
        return image["file"]
    path = Path(image["file"])
    if path.suffix == ".parquet":
        return f"{path.with_suffix('')}/{image['member']}.jpg"
    return f"{path.parent}/part_{path.stem}/{image['member']}"


@needs_collection
@pytest.mark.parametrize("name", EXPECTED)
def test_the_collection_is_read_rightly(name, tmp_path):
    expected = EXPECTED[name]
    root = COLLECTION / name
    if name in PACKED:
        assert "pass --unpack FOLDER" in refusal(root)
        packed.unpack(root, root := tmp_path / "images")
    found = layouts.read(root)
    truth = {
        unpacked(one): one for one in map(json.loads, (COLLECTION / "truth" / f"{name}.jsonl").read_text().splitlines())
    }
    right = {file: one for file, one in truth.items() if one["use"] == "labelled"}
    clutter = {file for file, one in truth.items() if one.get("why") == "clutter folder"}
    rows = {row.file: row for row in found.rows if row.file not in clutter}
    assert found.several == (expected["kind"] == "multi")
    also = [set(classes) for classes in expected.get("also_ok", {}).get("classes", [])]
    assert set(found.classes) in [set(expected["classes"]), *also]
    assert rows.keys() == right.keys()
    assert {file: row.split for file, row in rows.items()} == {file: one["split"] for file, one in right.items()}
    pairs = {(tuple(sorted(one["labels"])), tuple(sorted(rows[file].labels))) for file, one in right.items()}
    if set(found.classes) >= set(expected["classes"]):
        assert all(one == other for one, other in pairs)
    else:  # other names for the same classes
        assert len({one for one, _ in pairs}) == len(pairs) == len({other for _, other in pairs})
    assert set(found.unlabelled) == {file for file, one in truth.items() if one["use"] == "unlabelled"}
    assert {file for file, one in truth.items() if one["use"] == "ignored"} - clutter <= found.ignored.keys()
    assert len(found.missing) == expected["missing"]
    assert (found.group_by is None) == ("group_by" not in expected)


@needs_collection
@pytest.mark.parametrize("name", REFUSE)
def test_the_collection_is_refused_where_any_reading_is_wrong(name):
    message = refusal(COLLECTION / name)
    assert "\n" not in message and str(COLLECTION / name) in message
