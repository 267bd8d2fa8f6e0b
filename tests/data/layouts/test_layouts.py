"""Folders of images as people have them: rules of folders, splits and names, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from layout_trees import IDS, four, labels, numbered, refusal, splits, unequal, written
from trees import image_bytes, put
from worldsize.data import layouts
from worldsize.data.layouts import Hints

# Folders ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["", "download/", "a/b c/images/"])
@pytest.mark.parametrize(
    ("train", "val"),
    [("train", "val"), ("Training", "Test"), ("seg_train/seg_train", "seg_test/seg_test"), ("Final_Train/Images", "valid")],
)
def test_class_folders_at_any_depth(tmp_path, wrapper, train, val):
    paths = [
        f"{wrapper}{split}/{name}/{split[:2]}{i}.png" for split in (train, val) for name in ("cat", "dog") for i in (1, 2)
    ]
    found = layouts.read(unequal(tmp_path, *paths))
    assert labels(found) == {path: path.split("/")[-2] for path in paths}
    assert splits(found) == {path: "train" if path.startswith(wrapper + train) else "val" for path in paths}


def test_a_level_below_the_classes_is_no_class(tmp_path):
    paths = ["train/n1/images/1.png", "train/n2/images/2.png", "train/n2/images/3.png", "test/images/4.png"]
    found = layouts.read(unequal(tmp_path, *paths))
    assert labels(found) == dict(zip(paths, ["n1", "n2", "n2"], strict=False))
    assert found.unlabelled == ["test/images/4.png"] and not found.split


def test_a_class_may_be_called_train(tmp_path):
    assert layouts.read(unequal(tmp_path, *numbered("bus", "car", "train"))).classes == ["bus", "car", "train"]


def test_class_first_then_split(tmp_path):
    paths = numbered("cat/train", "cat/val", "dog/train", "dog/val")
    found = layouts.read(unequal(tmp_path, *paths))
    assert (labels(found), splits(found)) == ({p: p.split("/")[0] for p in paths}, {p: p.split("/")[1] for p in paths})


def test_one_folder_per_label(tmp_path):
    for kind, numbers in (("cat", (0, 1, 2, 3)), ("dog", (2, 3, 4)), ("cow", (3, 5))):
        for i in numbers:
            put(tmp_path / kind / f"{i}.png", image_bytes(f"#00000{i}"))
    assert "3 images are in the folders of several classes, such as cow/3.png and cat/3.png" in refusal(tmp_path)
    found = layouts.read(tmp_path, Hints(kind="multi"))
    files = ["cat/0.png", "cat/1.png", "cat/2.png", "cat/3.png", "cow/5.png", "dog/4.png"]
    assert labels(found) == dict(zip(files, ["cat", "cat", "cat+dog", "cat+cow+dog", "cow", "dog"], strict=True))
    assert len(layouts.read(tmp_path, Hints(kind="single")).rows) == 9


def test_linked_folders_count(tmp_path):
    unequal(tmp_path / "store", *numbered("cat", "dog"))
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
        for name in ("cat", "dog"):
            (tmp_path / "data" / split / name).symlink_to(tmp_path / "store" / name)
    assert len(layouts.read(tmp_path / "data").rows) == 12


def test_dates_in_a_class_are_no_classes(tmp_path):
    paths = numbered("cats/2024-01", "cats/2024-02", "dogs")
    assert labels(layouts.read(unequal(tmp_path, *paths))) == {path: path.split("/")[0] for path in paths}


def test_folds_of_a_class_tree_are_no_classes(tmp_path):
    paths = numbered("fold1/cat", "fold1/dog", "fold2/cat", "fold2/dog")
    assert layouts.read(unequal(tmp_path, *paths)).classes == ["cat", "dog"]


@pytest.mark.parametrize("outer", ["pets", "art"])
def test_two_levels_of_names_are_unclear(tmp_path, outer):
    paths = numbered(
        f"{outer}/cat", f"{outer}/dog", *(("wild/fox", "wild/elk") if outer == "pets" else ("photo/cat", "photo/dog"))
    )
    root = unequal(tmp_path, *paths)
    assert "pass --class-level 1 for the outer ones or --class-level 2" in refusal(root)
    assert layouts.read(root, Hints(level=1)).classes == sorted({path.split("/")[0] for path in paths})
    assert layouts.read(root, Hints(level=2)).classes == sorted({path.split("/")[1] for path in paths})


@pytest.mark.parametrize(
    "names", [("part_1", "part_2"), ("100APPLE", "101APPLE"), ("2023", "2024-05"), ("images", "photos")]
)
def test_parts_are_no_classes(tmp_path, names):
    root = unequal(tmp_path, *numbered(*names))
    assert "look like parts, not classes" in refusal(root)
    assert layouts.read(root, Hints(labels="folders")).classes == sorted(names)


def test_splits_with_other_classes_are_refused(tmp_path):
    root = unequal(tmp_path / "a", *numbered("train/cat", "train/dog", "val/cat", "val/Dog"))
    assert "train and val have different classes: only in train: dog; only in val: Dog" in refusal(root)
    root = unequal(tmp_path / "b", *numbered("train/cat", "train/dog", "test/dog"))
    assert "train and test have different classes: only in train: cat" in refusal(root)


def test_a_second_copy_does_not_count(tmp_path):
    paths = numbered("pets/cat", "pets/dog")
    for folder in ("", "pets/", "again/"):
        unequal(tmp_path, *(f"{folder}{path}" for path in paths))
    found = layouts.read(tmp_path)
    assert len(found.rows) == 6 and found.classes == ["cat", "dog"]
    assert set(found.ignored.values()) == {f"second copy of {path}" for path in labels(found)}


def test_another_version_inside_is_not_a_class(tmp_path):
    paths = numbered("cat", "dog")
    unequal(tmp_path, *paths)
    unequal(tmp_path / "all", *paths[::-1])
    assert "all contains folders with names of its neighbors (cat, dog)" in refusal(tmp_path)
    assert layouts.read(tmp_path, Hints(ignore=("all",))).classes == ["cat", "dog"]


def test_equal_training_and_validation_trees_are_no_copies(tmp_path):
    for split in ("train", "val"):
        unequal(tmp_path / split, *numbered("cat", "dog"))
    assert len(layouts.read(tmp_path).rows) == 12


@pytest.mark.parametrize(
    "junk",
    ["__MACOSX/cat/._1.png", ".ipynb_checkpoints/1.png", "cat/@eaDir/1.png/T.jpg", "cat/.thumbnails/1.png", "cat/._0.png"],
)
def test_what_programs_leave_behind_does_not_count(tmp_path, junk):
    root = unequal(tmp_path, *numbered("cat", "dog"), junk)
    (root / "to sort").mkdir()
    found = layouts.read(root)
    assert (found.classes, list(found.ignored)) == (["cat", "dog"], [junk])
    assert "folders without readable images are no classes: to sort" in found.notes


@pytest.mark.parametrize("mask", ["masks/{}", "{}_mask", "annotations/trimaps/{}"])
def test_masks_are_no_images(tmp_path, mask):
    names = [f"{kind}_{i}" for kind in ("pug", "boxer") for i in range(3)]
    root = unequal(tmp_path, *(f"images/{n}.png" for n in names))
    place = "{}.png" if "/" in mask else "images/{}.png"
    unequal(root, *(place.format(mask.format(n)) for n in names))
    found = layouts.read(root)
    assert len(found.rows) == len(found.ignored) == 6 and found.classes == ["boxer", "pug"]


def test_classes_about_masks_are_classes(tmp_path):
    for name, color in (("mask", "red"), ("bare", "lime")):
        for i in (1, 2):
            put(tmp_path / name / f"{i}.png", image_bytes(color, "PNG" if i == 1 else "BMP"))
    assert layouts.read(tmp_path).classes == ["bare", "mask"]


# Splits, groups and names -------------------------------------------------------------------------------------------------


def test_lists_give_the_split(tmp_path):
    paths = numbered("images/ant", "images/bee")
    unequal(tmp_path, *paths)
    (tmp_path / "meta").mkdir()
    entries = [f"{path.split('/')[1]}/{Path(path).stem}\n" for path in paths]
    (tmp_path / "meta" / "trainval.txt").write_text("".join(entries[i] for i in (0, 1, 3, 4)))
    (tmp_path / "meta" / "test.txt").write_text("".join(entries[i] for i in (2, 5)).rstrip())
    found = layouts.read(tmp_path)
    assert [splits(found)[path] for path in paths] == ["train", "train", "val"] * 2
    (tmp_path / "meta" / "val.txt").write_text(entries[2])
    assert f"{paths[2]} is in meta/test.txt and in meta/val.txt" in refusal(tmp_path)
    assert layouts.read(tmp_path, Hints(ignore=("meta/val.txt",))).rows == found.rows
    (tmp_path / "meta" / "val.txt").write_text(entries[0])  # trainval has the images of val too
    assert [splits(layouts.read(tmp_path))[path] for path in paths] == ["val", "train", "test", "train", "train", "test"]


@pytest.mark.parametrize(
    ("name", "values"),
    [("is_valid", "False False False True"), ("split", "train Training train valid"), ("is_train", "1 1 1 0")],
)
def test_a_column_gives_the_split(tmp_path, name, values):
    rows = "".join(f"{n},{k},{v}\n" for n, k, v in zip(IDS, "abab", values.split(), strict=True))
    found = layouts.read(written(four(tmp_path), t_csv=f"fname,labels,{name}\n{rows}"))
    assert [splits(found)[f"train_images/{n}.jpg"] for n in IDS] == ["train", "train", "train", "val"]


def test_names_of_files(tmp_path):
    paths = [f"train/{kind}.{i}.jpg" for kind in ("cat", "big_dog") for i in range(3)]
    found = layouts.read(unequal(tmp_path, *paths, "test1/1.jpg", "test1/2.jpg"))
    assert labels(found) == {path: Path(path).name.split(".")[0] for path in paths}
    assert len(found.unlabelled) == 2


def test_names_of_files_with_the_number_first(tmp_path):
    paths = [f"{10 * k + i}_{kind}.png" for k, kind in enumerate(("cat", "dog")) for i in range(3)]
    assert labels(layouts.read(unequal(tmp_path, *paths))) == {path: path[:-4].split("_")[1] for path in paths}


@pytest.mark.parametrize(
    "names",
    [
        ("IMG_{}", "DSC_{}"),
        ("photo{}", "photo{}"),
        ("{}", "{}"),
        ("a{}", "b"),
        ("{}_left", "{}_right"),
        ("0001_c1s1_000151_{}", "0002_c1s1_000151_{}"),
        ("person1_{}", "person2_{}"),
        ("cat_{}", "dog_{}", *["{}"] * 3),
    ],
)
def test_names_of_cameras_are_no_classes(tmp_path, names):
    root = unequal(tmp_path, *(f"x/{name.format(10 * k + i)}.jpg" for k, name in enumerate(names) for i in range(3)))
    assert "nothing has their labels" in refusal(root)


@pytest.mark.parametrize(
    ("names", "prefixed", "common"),
    [
        (["a_jpg.rf.0f1", "a_jpg.rf.aa2", "b_jpg.rf.991"], True, "name before .rf."),
        (["00000_00000", "00000_00001", "00001_00000"], False, "track (the number before the frame's number, per class)"),
        (["walk frame 1", "walk frame 2", "run_frame_1"], True, "name before the frame's number"),
    ],
)
def test_names_give_groups(tmp_path, names, prefixed, common):
    found = layouts.read(
        unequal(tmp_path, *(f"{kind}/{kind if prefixed else ''}{n}.png" for kind in ("x", "y") for n in names))
    )
    assert found.group_by == common  # "images with the same ... are on one side"
    groups = [row.group for row in found.rows if row.labels == ("x",)]
    assert len(groups) == 3 and len(set(groups)) == 2 and None not in groups
    assert layouts.read(tmp_path, Hints(group_by="none")).group_by is None


# Refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "contains no images: name the folder that has them"),
        ({"a.txt": "x"}, "contains no images"),
        ({"a.7z": "x"}, "only archives such as a.7z: unpack them first"),
        ({"a.tar": "x"}, "a.tar may contain images: pass --unpack FOLDER"),
        ({"a.parquet": "x"}, "a.parquet may contain images: pass --unpack FOLDER"),
        ({"a.tfrecord": "x"}, "a.tfrecord may contain images: write them to files"),
        ({".a.png": None}, ".a.png is left out (hidden)"),
        ({"cats/1.png": None, "cats/2.png": None}, "all 2 images of"),
        ({"a/1.png": None, "a/2.png": None, "b/c/3.png": None, "images/4.png": None, "4.txt": "0 .5 .5 .1 .1"}, ""),
        (
            {"images/train/1.png": None, "images/val/2.png": None, "labels/1.txt": "0 0.5 0.5 .1 .1\n1 .1 1 1 1\n"},
            "has boxes or",
        ),
        (
            {"images/1.png": None, "labels/1.xml": "<annotation><object><name>cat</name></object></annotation>"},
            "has boxes or",
        ),
        (
            {
                "1.png": None,
                "1.json": '{"shapes": [{"label": "a"}]}',
                "2.png": None,
                "2.json": '{"shapes": [{"label": "b"}]}',
            },
            "boxes or",
        ),
        (
            {"jpg/1.png": None, "imagelabels.mat": "x", "labels.xlsx": "x"},
            "imagelabels.mat is not read; labels.xlsx is not read",
        ),
        ({"train/1.png": None, "train_masks/1_mask.gif": None}, "has images and masks, but no labels"),
        ({"train/cat/1.png": None, "test/2.png": None}, "nothing in"),
    ],
)
def test_what_has_no_labels_is_refused(tmp_path, files, message):
    for i, (name, text) in enumerate(files.items()):
        put(tmp_path / name, image_bytes(f"#0000{i:02x}") if text is None else text.encode())
    if message:
        assert message in refusal(tmp_path)
    else:
        assert layouts.read(tmp_path).classes == ["a", "b", "images"]


def test_a_link_to_a_folder_above_ends(tmp_path):
    root = unequal(tmp_path, *numbered("cat", "dog"))
    (root / "cat" / "again").symlink_to(root)
    assert layouts.read(root).classes == ["cat", "dog"]
