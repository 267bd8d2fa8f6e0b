"""Images that are not used are counted, and every command says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from trees import image_bytes, opened, put, refusal, tree, two_classes
from worldsize import cli
from worldsize.data.datasets import file_index
from worldsize.data.datasets.test_sets import open_folder
from worldsize.data.images.pillow import BrokenImage, decode
from worldsize.data.unused_files import Unused

FORMATS = ("avif", "heic", "jxl", "jp2", "tga")


def messy(root: Path) -> Path:
    two_classes(root)
    tree(
        root, *(f"train/cat/deeper/{i}.png" for i in range(3)), "train/dog/a/b/1.jpg", "train/beside.png", "val/cat/x/2.png"
    )
    for name in FORMATS:
        put(root / "train" / "dog" / f"photo.{name}", b"not decoded here")
    put(root / "train" / "cat" / ".hidden.avif", b"hidden")
    put(root / "train" / "cat" / "x" / "notes.txt", b"no image")
    put(root / "train" / "cat" / "readme.md", b"no image, although it lies here")
    return root


TRAIN = "not used: 4 in subfolders, 1 outside the class folders, 5 of unsupported formats (avif, heic, jp2, jxl, tga)"


@pytest.mark.parametrize("layout", ["folder", "imagenet", "multilabel"])
def test_what_is_not_used_is_counted_each_time(tmp_path, layout):
    root = messy(tmp_path / "root")
    for _ in range(2):
        data = opened(root, layout)
        assert data.notes == (
            f"{root / 'train'}: {TRAIN}; to use them, move them into FOLDER/CLASS, or convert them to JPEG, PNG or WebP",
            f"{root / 'val'}: not used: 1 in subfolders; to use them, move them into FOLDER/CLASS",
        )
        assert len(data.train) == 3
    put(root / "val" / "cat" / "x" / "3.png")
    assert "not used: 2 in subfolders" in opened(root, layout).notes[1]


def test_a_cached_listing_keeps_the_counts(tmp_path):
    root = two_classes(tmp_path / "root")
    put(root / "train" / "dog" / "photo.AVIF", b"not decoded here")
    notes = [opened(root).notes for _ in range(2)]
    assert notes[0] == notes[1] and "1 of unsupported formats (avif)" in notes[0][0]
    put(root / "train" / "beside.png")
    assert "1 outside the class folders, 1 of unsupported" in opened(root).notes[0]


def test_the_content_decides_not_the_name(tmp_path):
    root = two_classes(tmp_path / "root")
    put(root / "train" / "dog" / "really.avif", image_bytes())
    put(root / "train" / "dog" / "noname", b"\0\0\0\x1cftypavif" + bytes(30))
    data = opened(root)
    assert len(data.train) == 4
    assert "1 of unsupported formats (avif)" in data.notes[0]


def test_nothing_is_said_about_folders_without_such_images(tmp_path):
    root = two_classes(tmp_path / "root")
    put(root / "train" / "cat" / "sub" / "notes.txt", b"no image")
    put(root / "train" / "list.csv", b"1,2")
    assert opened(root).notes == ()
    assert not Unused(nested=3)


@pytest.mark.parametrize(("path", "expected"), [("deeper/1.png", "1 in subfolders"), ("1.heic", r"1 of unsupported.*heic")])
def test_a_class_that_has_only_those_says_so(tmp_path, path, expected):
    root = two_classes(tmp_path / "root")
    (root / "train" / "dog" / "3.png").unlink()
    put(root / "train" / "dog" / path, b"")
    message = refusal(root)
    assert message.startswith(f"{root / 'train' / 'dog'} contains no images; ")
    assert expected.split(".*")[-1] in message and "to use them" in message


def test_images_without_a_validation_folder_and_test_images_are_counted_too(tmp_path):
    root = tree(tmp_path / "root", "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", "dog/sub/3.png")
    (tmp_path / "list.txt").write_text("cat/1.png\ndog/2.png\n")
    (note,) = opened(root, val_list=tmp_path / "list.txt").notes
    assert "not used: 1 in subfolders" in note
    assert open_folder(root, ("cat", "dog"), tmp_path / "cache").unused.in_subfolders == 1


def test_images_that_no_table_names_are_counted(tmp_path):
    root = tree(tmp_path / "root", *(f"images/{i}.png" for i in range(6)))
    (root / "train.csv").write_text("image,labels\nimages/0.png,a\nimages/1.png,b\n")
    (root / "val.csv").write_text("image,labels\nimages/2.png,a\nimages/3.png,b\n")
    (note,) = opened(root, "multilabel").notes
    assert note == f"{root / 'train.csv'}: not used: 2 that no table names; to use them, add them to the tables"


@pytest.mark.parametrize("command", [("verify", "--root"), ("info",)])
def test_commands_about_data_say_it(tmp_path, capsys, command):
    root = messy(tmp_path / "root")
    assert cli.main(["data", *command, str(root)]) == 0
    assert f"warning: {root / 'train'}: {TRAIN}" in capsys.readouterr().out


def test_a_folder_to_predict_is_searched_with_a_warning(tmp_path, caplog):
    tree(tmp_path / "root", "1.png", "sub/2.png")
    put(tmp_path / "root" / "sub" / "3.avif", b"not decoded here")
    assert file_index.below(tmp_path / "root") == ["1.png", "sub/2.png"]
    assert "not used: 1 of unsupported formats (avif)" in caplog.text


def test_packing_says_it(tmp_path, capsys):
    root = messy(tmp_path / "root")
    assert cli.main(["data", "pack", "--root", str(root), "--out", str(tmp_path / "out")]) == 0
    assert f"warning: {root / 'train'}: {TRAIN}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x1cftypavif", "AVIF"),
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"\0\0\0\x18ftypmif1", "HEIC"),
        (b"\xff\x0a\xff\x0a", "JXL"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JXL"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"8BPS\0\1", "PSD"),
    ],
)
def test_an_image_of_an_unsupported_format_is_named_whatever_its_extension(data, name):
    with pytest.raises(BrokenImage, match=f"^{name} is not supported: convert it to JPEG, PNG or WebP$"):
        decode(data + bytes(40))


def test_a_real_avif_is_named(tmp_path):
    try:
        Image.new("RGB", (20, 20), "red").save(tmp_path / "a.avif")
    except (KeyError, ValueError, OSError):
        pytest.skip("Pillow was built without AVIF")
    with pytest.raises(BrokenImage, match="AVIF is not supported"):
        decode((tmp_path / "a.avif").read_bytes())
