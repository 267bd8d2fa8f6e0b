"""Folders of images as people have them: each rule on a tiny folder, and the collection of layouts in shared/."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from paths import SHARED
from trees import image_bytes, put
from worldsize.data import layouts
from worldsize.data.layouts import Hints, Reading, Unclear, packed
from worldsize.errors import DataError, UserError

COLLECTION = SHARED / "layouts"
EXPECTED = json.loads((COLLECTION / "expected.json").read_text()) if COLLECTION.is_dir() else {}
REFUSE = json.loads((COLLECTION / "refuse.json").read_text()) if COLLECTION.is_dir() else {}
# Images inside other files, which --unpack writes to files.
PACKED = {"hf_parquet", "wds_clip_benchmark"}
needs_collection = pytest.mark.skipif(not COLLECTION.is_dir(), reason=f"{COLLECTION} is not there")


def labels(reading: Reading) -> dict[str, str]:
    return {row.file: "+".join(sorted(row.labels)) for row in reading.rows}


def splits(reading: Reading) -> dict[str, str | None]:
    return {row.file: row.split for row in reading.rows}


def numbered(*folders: str, count: int = 3) -> list[str]:
    """Paths of images, with another name in each folder."""
    return [f"{folder}/{100 * i + n}.png" for i, folder in enumerate(folders) for n in range(count)]


def unequal(root: Path, *paths: str) -> Path:
    """Images that all have different bytes."""
    for i, path in enumerate(paths):
        put(root / path, image_bytes(f"#{i * 7919 % 2**24:06x}"))
    return root


def written(root: Path, **files: str) -> Path:
    for name, text in files.items():
        stem, _, extension = name.rpartition("_")
        (root / f"{stem}.{extension}").write_text(text, "utf-8")
    return root


def refusal(root: Path, **hints) -> str:
    with pytest.raises(Unclear) as caught:
        layouts.read(root, Hints(**hints))
    return str(caught.value)


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
    assert "folders without images are no classes: to sort" in found.notes


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


# Tables -------------------------------------------------------------------------------------------------------------------

IDS = ["0a1", "7", "0012", "x-y"]


def four(root: Path) -> Path:
    return unequal(root, *(f"train_images/{name}.jpg" for name in IDS), "test_images/99.jpg")


@pytest.mark.parametrize(
    "rows",
    [
        "id_code,diagnosis\n0a1,0\n7,1\n0012,0\nx-y,1\n",
        "\ufeffDatei;Klasse;\r\nC:\\Fotos\\0a1.jpg;0 ;\r\nC:\\Fotos\\7.jpg;1;\r\n0012.jpg;0;\r\nx-y.JPG;1;\r\n;;\r\n",
        "label\timage\n0\t./train_images/0a1.jpg\n1\t/data/train_images/7.jpg\n0\thttps://x.y/a/0012.jpg?s=1\n1\tx-y\n",
        "0a1 0\n7 1\n0012 0\nx-y 1\n",
        "TRAIN,gs://x/0a1.jpg,0\nTRAIN,gs://x/7.jpg,1\nTRAIN,gs://x/0012.jpg,0\nTRAINING,gs://x/x-y.jpg,1\n",
        "0 0 0a1.jpg\n1 1 7.jpg\n2 0 0012.jpg\n3 1 x-y.jpg\n",
        "# a comment\n0a1.jpg,0\n7.jpg,1\n0012.jpg,0\nx-y.jpg,1",
    ],
)
def test_a_table_of_labels(tmp_path, rows):
    root = written(four(tmp_path), train_csv="" if rows[0] == "#" else rows, list_txt="" if rows[0] != "#" else rows)
    (root / "sample_submission.csv").write_text("id_code,diagnosis\n99,0\n")
    found = layouts.read(root)
    assert labels(found) == dict(zip((f"train_images/{name}.jpg" for name in IDS), "0101", strict=True))
    assert (found.several, found.unlabelled, found.split) == (False, ["test_images/99.jpg"], False)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"file_name": f"{n}.jpg", "label": kind} for n, kind in zip(IDS, "abab", strict=True)]),
        "\n".join(
            json.dumps({"image": f"train_images/{n}.jpg", "label": kind}) for n, kind in zip(IDS, "abab", strict=True)
        ),
        json.dumps({f"{n}.jpg": kind for n, kind in zip(IDS, "abab", strict=True)}),
        json.dumps({"a": ["0a1.jpg", "0012.jpg"], "b": ["7.jpg", "x-y.jpg"]}),
        json.dumps(
            {
                "images": [{"id": i, "file_name": f"{n}.jpg"} for i, n in enumerate(IDS)],
                "annotations": [{"image_id": i, "category_id": i % 2} for i in range(4)],
                "categories": [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}],
            }
        ),
        json.dumps(
            [
                {
                    "data": {"image": f"/data/upload/1/{i:08x}-{n}.jpg"},
                    "annotations": [{"result": [{"value": {"choices": [kind]}}]}],
                }
                for i, (n, kind) in enumerate(zip(IDS, "abab", strict=True))
            ]
        ),
    ],
)
def test_json(tmp_path, text):
    found = layouts.read(written(four(tmp_path), labels_json=text))
    assert labels(found) == dict(zip((f"train_images/{name}.jpg" for name in IDS), "abab", strict=True))
    assert not found.several


def test_cvat_tags(tmp_path):
    rows = "".join(
        f'<image id="1" name="{n}.jpg"><tag label="{kind}"/></image>' for n, kind in zip(IDS[:3], "aba", strict=True)
    )
    root = written(
        four(tmp_path), annotations_xml=f'<?xml version="1.0" encoding="utf-8"?><a>{rows}<image name="x-y.jpg"/></a>'
    )
    found = layouts.read(root)
    assert list(labels(found).values()) == ["b" if "/7." in file else "a" for file in labels(found)]
    assert "train_images/x-y.jpg" in found.unlabelled


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["rust", "scab", "scab rust", "rust scab"], ["rust", "scab", "rust+scab", "rust+scab"]),
        (["a|b", "b", "No Finding", "a|c"], ["a+b", "b", "", "a+c"]),
        (["a;b", "b", "a", "b;a"], ["a+b", "b", "a", "a+b"]),
        (["Größe S", "Größe M", "défaut", "Größe S"], None),
        (["traffic light", "car", "car", "traffic light"], None),
        (["a b", "a c", "d b", "d c"], None),
    ],
)
def test_several_labels_in_a_cell(tmp_path, cells, expected):
    rows = "".join(f"{name},{cell}\n" for name, cell in zip(IDS, cells, strict=True))
    found = layouts.read(written(four(tmp_path), labels_csv="image,labels\n" + rows))
    assert found.several == (expected is not None)
    assert labels(found) == dict(zip((f"train_images/{name}.jpg" for name in IDS), expected or cells, strict=True))


@pytest.mark.parametrize(
    ("table", "several", "expected"),
    [
        ("image,labels\n0a1.jpg,a;b\n7.jpg,b\n0012.jpg,\nx-y.jpg,a\n", True, ["a+b", "b", "", "a"]),
        ("id,cat,dog\n0a1,1,0\n7,0,1\n0012,1,0\nx-y,1,0\n", False, ["cat", "dog", "cat", "cat"]),
        ("id,age,cat,dog\n0a1,9,1.0,1.0\n7,9,0.0,1.0\n0012,8,0.0,0.0\nx-y,7,1.0,0.0\n", True, ["cat+dog", "dog", "", "cat"]),
        ("id,LabelName,Confidence\n0a1,a,1\n0a1,b,1\n7,b,1\n7,a,0\n0012,a,0\nx-y,a,1\n", True, ["a+b", "b", "", "a"]),
        ("id,label\n0a1,a\n0a1,b\n7,b\n0012,a\nx-y,a\n", True, ["a+b", "b", "a", "a"]),
        (
            "id,PredictionString\n0a1,n1 1 2 3 4 n1 5 6 7 8\n7,n2 1 2 3 4\n0012,n1 1 1 1 1\nx-y,n2 1 2 3 4 \n",
            False,
            "n1 n2 n1 n2",
        ),
    ],
)
def test_forms_of_label_columns(tmp_path, table, several, expected):
    found = layouts.read(written(four(tmp_path), labels_csv=table))
    assert found.several == several
    wanted = expected.split() if isinstance(expected, str) else expected
    assert labels(found) == dict(zip((f"train_images/{name}.jpg" for name in IDS), wanted, strict=True))


def test_an_image_with_two_labels_among_many_is_unclear(tmp_path):
    root = unequal(tmp_path, *(f"{i}.jpg" for i in range(40)))
    written(root, labels_csv="id,label\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(40)) + "3,a\n")
    assert "gives 1 images two labels, the first is 3.jpg" in refusal(root)
    assert layouts.read(root, Hints(kind="multi")).several


def test_labels_among_other_columns(tmp_path):
    table = "lesion_id,image_id,dx,dx_type,sex\nL1,0a1,nv,histo,m\nL1,7,nv,seen,m\nL2,0012,mel,histo,f\nL3,x-y,mel,seen,f\n"
    found = layouts.read(written(four(tmp_path), metadata_csv=table))
    assert (found.classes, found.group_by) == (["mel", "nv"], "lesion_id")
    assert [row.group for row in found.rows if row.labels == ("nv",)] == ["L1", "L1"]
    assert layouts.read(tmp_path, Hints(column="sex", labels="metadata.csv")).classes == ["f", "m"]


def test_equally_good_columns_are_unclear(tmp_path):
    root = written(four(tmp_path), data_csv="id,genre,emotion\n0a1,a,x\n7,a,y\n0012,b,y\nx-y,b,x\n")
    assert "2 columns that may have the labels (genre, emotion)" in refusal(root)
    assert layouts.read(root, Hints(column="emotion")).classes == ["x", "y"]
    assert "no table that names images has this column" in refusal(root, column="gone")
    assert "--labels gone.csv: no such table" in refusal(root, labels="gone.csv")


def test_tables_that_contradict_each_other_are_unclear(tmp_path):
    rows = "0a1,{}\n7,b\n0012,a\nx-y,b\n"
    root = written(four(tmp_path), first_csv="id,label\n" + rows.format("a"), second_csv="image,class\n" + rows.format("b"))
    assert "first.csv and second.csv contradict each other: train_images/0a1.jpg is 'a' in one and 'b' in" in refusal(root)
    assert labels(layouts.read(root, Hints(labels="second.csv")))["train_images/0a1.jpg"] == "b"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.json", '{"0": "ant", "1": "bee"}'),
        ("classes.txt", "ant\nbee\n"),
        ("names.csv", "0,ant\n1,bee\n"),
        ("map.json", '{"ant": 0, "bee": 1}'),
    ],
)
def test_numbers_get_the_names_of_a_file(tmp_path, name, text):
    root = written(four(tmp_path), train_csv="id,label\n0a1,0\n7,1\n0012,0\nx-y,1\n")
    (root / name).write_text(text)
    assert layouts.read(root).classes == ["ant", "bee"]


def test_equal_names_are_found_next_to_the_table(tmp_path):
    for split, kinds in (("train", "aabb"), ("test", "bbaa")):
        unequal(tmp_path / split, *(f"{i}.png" for i in range(4)))
        written(tmp_path / split, metadata_csv="file_name,label\n" + "".join(f"{i}.png,{k}\n" for i, k in enumerate(kinds)))
    found = layouts.read(tmp_path)
    assert [label for _, label in sorted(labels(found).items())] == [*"bbaa", *"aabb"]
    assert set(splits(found).values()) == {"train", "val"}


def test_rows_without_images_and_images_without_rows(tmp_path):
    root = written(four(tmp_path), train_csv="id,label\n0a1,a\n7,b\ngone,b\n0012,\n")
    found = layouts.read(root)
    assert (found.missing, len(found.rows)) == (["gone"], 2)
    assert found.unlabelled == ["test_images/99.jpg", "train_images/0012.jpg", "train_images/x-y.jpg"]


# Tables and folders -------------------------------------------------------------------------------------------------------


def test_folders_for_training_and_a_table_for_validation(tmp_path):
    root = unequal(tmp_path, *numbered("train/n01", "train/n02"), "val/images/a.png", "val/images/b.png")
    written(root, val_txt="a.png\tn02\t0\t1\t30\t31\nb.png\tn01\t0\t1\t30\t31\n")
    found = layouts.read(root)
    assert (labels(found)["val/images/a.png"], splits(found)["val/images/a.png"]) == ("n02", "val")
    assert len(found.rows) == 8


def test_a_table_that_agrees_with_the_folders_under_other_names(tmp_path):
    paths = numbered("00000", "00014")
    unequal(tmp_path, *paths)
    written(tmp_path, all_csv="Filename;ClassId\n" + "".join(f"{p};{int(p.split('/')[0])}\n" for p in paths))
    assert layouts.read(tmp_path).classes == ["00000", "00014"]


def test_noisy_columns_do_not_outweigh_the_folders(tmp_path):
    paths = numbered("ant", "bee")
    unequal(tmp_path, *paths)
    rows = "".join(f"{p},{p.split('/')[0]},{'bee' if p == paths[0] else 'ant'}\n" for p in paths)
    written(tmp_path, noisy_csv="path,noisy_labels_0,noisy_labels_50\n" + rows)
    assert labels(layouts.read(tmp_path)) == {path: path.split("/")[0] for path in paths}


def test_a_table_that_contradicts_the_folders_is_unclear(tmp_path):
    paths = numbered("ant", "bee")
    unequal(tmp_path, *paths)
    written(tmp_path, t_csv="file,label\n" + "".join(f"{p},{'xy'[i % 2]}\n" for i, p in enumerate(paths)))
    assert "Pass --labels folders, or --labels FILE" in refusal(tmp_path)
    assert layouts.read(tmp_path, Hints(labels="folders")).classes == ["ant", "bee"]
    assert layouts.read(tmp_path, Hints(labels="t.csv")).classes == ["x", "y"]


@pytest.mark.parametrize("folders", [("0", "1"), ("part0", "part1"), ("images_001/images", "images_002/images")])
def test_shards_do_not_outweigh_a_table(tmp_path, folders):
    paths = numbered(*folders, count=4)
    unequal(tmp_path, *paths)
    written(tmp_path, t_csv="file,label\n" + "".join(f"{Path(p).name},{'xy'[i % 2]}\n" for i, p in enumerate(paths)))
    assert layouts.read(tmp_path).classes == ["x", "y"]


# Other forms of lists ------------------------------------------------------------------------------------------------------


def test_tables_that_number_the_images(tmp_path):
    paths = [f"images/{kind}/x{kind[:3]}_{i}.png" for kind in ("001.Ant", "002.Bee") for i in range(3)]
    unequal(tmp_path, *paths)
    written(
        tmp_path,
        images_txt="".join(f"{i} {path.removeprefix('images/')}\n" for i, path in enumerate(paths, 1)),
        image_class_labels_txt="".join(f"{i} {1 + (i > 3)}\n" for i in range(1, 7)),
        train_test_split_txt="".join(f"{i} {int(i % 3 > 0)}\n" for i in range(1, 7)),
        classes_txt="1 001.Ant\n2 002.Bee\n",
        bounding_boxes_txt="".join(f"{i} 1.0 2.0 3{i}.5 4.0\n" for i in range(1, 7)),
    )
    found = layouts.read(tmp_path)
    assert found.classes == ["001.Ant", "002.Bee"]
    assert [splits(found)[path] for path in paths] == ["train", "train", "val"] * 2


@pytest.mark.parametrize("extension", ["txt", "csv"])
def test_attributes_of_faces_with_a_partition(tmp_path, extension):
    root = unequal(tmp_path, *(f"img_align/{i:06}.jpg" for i in range(6)))
    rows = [(1, -1), (1, 1), (-1, -1), (-1, 1), (-1, 1), (1, 1)]
    if extension == "txt":
        attributes = "6\n5_o_Clock Bald\n" + "".join(f"{i:06}.jpg {a:2} {b:2}\n" for i, (a, b) in enumerate(rows))
        written(root, list_eval_partition_txt="".join(f"{i:06}.jpg {i % 3}\n" for i in range(6)), list_attr_txt=attributes)
    else:
        attributes = "image_id,5_o_Clock,Bald\n" + "".join(f"{i:06}.jpg,{a},{b}\n" for i, (a, b) in enumerate(rows))
        partition = "image_id,partition\n" + "".join(f"{i:06}.jpg,{i % 3}\n" for i in range(6))
        written(root, list_eval_partition_csv=partition, list_attr_csv=attributes)
    found = layouts.read(root)
    assert [sorted(row.labels) for row in found.rows] == [
        [n for n, v in zip(("5_o_Clock", "Bald"), r, strict=True) if v > 0] for r in rows
    ]
    assert [row.split for row in found.rows] == ["train", "val", "test"] * 2


def test_lists_of_one_subject_are_one_table(tmp_path):
    root = unequal(tmp_path, *(f"data/images/{i:04}.jpg" for i in range(8)))
    for part, numbers in (("train", range(4)), ("test", range(4, 8))):
        for subject, kinds in (("variant", ("707", "A300 B4", "747")), ("family", ("Boeing", "Airbus", "Boeing"))):
            (root / f"images_{subject}_{part}.txt").write_text("".join(f"{i:04} {kinds[i % 3]}\n" for i in numbers))
    assert "images_family_test.txt" in (message := refusal(root)) and "images_variant_test.txt" in message
    found = layouts.read(root, Hints(labels="images_variant_train.txt"))
    assert (found.classes, sum(row.split == "train" for row in found.rows)) == (["707", "747", "A300 B4"], 4)


def test_a_list_for_each_label(tmp_path):
    root = unequal(tmp_path, *(f"JPEGImages/{i:06}.jpg" for i in range(6)))
    for name, numbers in (("cat", (0, 1, 3)), ("dog", (1, 2, 4))):
        for part, inside in (("train", range(4)), ("val", range(4, 6)), ("trainval", range(6))):
            text = "".join(f"{i:06} {1 if i in numbers else -1:2}\n" for i in inside)
            put(root / "ImageSets" / "Main" / f"{name}_{part}.txt", text.encode())
    for part, inside in (("train", range(4)), ("val", range(4, 6)), ("trainval", range(6))):
        put(root / "ImageSets" / "Main" / f"{part}.txt", "".join(f"{i:06}\n" for i in inside).encode())
    found = layouts.read(root)
    assert list(labels(found).values()) == ["cat", "cat+dog", "dog", "cat", "dog", ""]
    assert list(splits(found).values()) == ["train"] * 4 + ["val"] * 2


@pytest.mark.parametrize(
    ("place", "form"),
    [("train/{}.cls", "{}"), ("labels/{}.txt", "{}\n"), ("train/{}.json", '{{"label": "{}", "width": 8}}')],
)
def test_a_file_for_each_image(tmp_path, place, form):
    root = unequal(tmp_path, *(f"train/s{i:03}.png" for i in range(6)))
    for i in range(6):
        put(root / place.format(f"s{i:03}"), form.format(i % 2).encode())
    written(root, classnames_txt="ant\nbee\n")
    assert list(labels(layouts.read(root)).values()) == ["ant", "bee"] * 3


def test_captions_are_no_labels(tmp_path):
    root = unequal(tmp_path, *(f"train/s{i:03}.png" for i in range(6)))
    for i in range(6):
        put(root / f"train/s{i:03}.txt", f"a photo of thing {i}".encode())
    assert "nothing has their labels" in refusal(root)


def test_patients_are_groups_and_no_classes(tmp_path):
    root = unequal(tmp_path / "a", *numbered("train/patient_1", "train/patient_2"))
    assert "look like parts, not classes" in refusal(root)
    paths = numbered("benign/patient_1", "benign/patient_2", "malignant/patient_3", "malignant/patient_4")
    found = layouts.read(unequal(tmp_path / "b", *paths))
    assert {(row.labels, row.group) for row in found.rows} == {((p.split("/")[0],), p.split("/")[1]) for p in paths}


def test_uncertain_labels_are_unclear(tmp_path):
    paths = numbered("small/train/patient1/study1", "small/train/patient2/study1")
    root = unequal(tmp_path, *paths)
    values = ["1.0,0.0", "-1.0,1.0", "0.0,-1.0", "0.0,", "1.0,1.0", "0.0,0.0"]
    rows = "".join(f"{path},60,{value}\n" for path, value in zip(paths, values, strict=True))
    written(root, train_csv=f"Path,Age,Edema,Fracture\n{rows}")
    assert "columns that may have the labels (Edema, Fracture)" in refusal(root)


def test_yes_and_no_about_images_with_another_column_are_unclear(tmp_path):
    root = written(four(tmp_path), t_csv="file,bird,night,flipped\n0a1,owl,1,0\n7,owl,0,0\n0012,kite,0,1\nx-y,kite,1,1\n")
    assert "3 columns that may have the labels (bird, night, flipped)" in refusal(root)


def test_a_column_without_a_telling_name_does_not_outweigh_the_folders(tmp_path):
    paths = numbered("ant", "bee")
    unequal(tmp_path, *paths)
    written(tmp_path, t_csv="file,weather\n" + "".join(f"{p},{('sun', 'rain')[i % 2]}\n" for i, p in enumerate(paths)))
    assert layouts.read(tmp_path).classes == ["ant", "bee"]


def test_measurements_are_no_labels(tmp_path):
    root = unequal(tmp_path, *(f"{i}.jpg" for i in range(60)))
    written(root, t_csv="file,grams\n" + "".join(f"{i}.jpg,{i // 2}\n" for i in range(60)))
    assert "nothing has their labels" in refusal(root)


def test_two_datasets_in_one_folder_are_unclear(tmp_path):
    paths = numbered(
        *(f"{name}/{split}/{kind}" for name in ("zoo", "farm") for split in ("train", "val") for kind in ("pig", "cow"))
    )
    assert "pass --class-level" in refusal(unequal(tmp_path, *paths))


@pytest.mark.parametrize("inside", ["patient{}/study1_{}", "all/{1}"])
def test_names_deep_inside_are_unclear(tmp_path, inside):
    kinds = ("negative", "positive")
    names = [inside.format(i, kind) for i, kind in enumerate(kinds)]
    assert "those inside foot (" in refusal(
        unequal(tmp_path, *numbered(*(f"{part}/{n}" for part in ("hand", "foot") for n in names)))
    )


def test_a_box_in_each_image_is_no_label(tmp_path):
    root = four(tmp_path)
    images = [{"id": i, "file_name": f"{name}.jpg"} for i, name in enumerate(IDS)]
    boxes = [{"image_id": i, "category_id": i % 2, "bbox": [1, 1, 2, 2]} for i in range(4)]
    text = json.dumps(
        {"images": images, "annotations": boxes, "categories": [{"id": 0, "name": "a"}, {"id": 1, "name": "b"}]}
    )
    assert "has boxes or regions" in refusal(written(root, instances_json=text))


def test_equal_names_are_found_by_the_split_that_the_table_is_called_after(tmp_path):
    root = unequal(tmp_path, *(f"{split}/{i}.png" for split in ("train", "test") for i in range(1, 5)))
    written(root, trainLabels_csv="id,label\n1,frog\n2,truck\n3,frog\n4,truck\n")
    found = layouts.read(root)
    assert labels(found) == {f"train/{i}.png": ("truck", "frog")[i % 2] for i in range(1, 5)}
    assert set(splits(found).values()) == {None}


def test_numbered_folders_next_to_an_unclear_table_are_unclear(tmp_path):
    paths = numbered("c0", "c1", count=4)
    rows = "".join(f"{path},{'xy'[i % 2]},{'uv'[i // 2 % 2]}\n" for i, path in enumerate(paths))
    root = written(unequal(tmp_path, *paths), t_csv=f"file,genre,emotion\n{rows}")
    assert "2 columns that may have the labels (genre, emotion)" in refusal(root)


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
    ("names", "group"),
    [
        (["a_jpg.rf.0f1", "a_jpg.rf.aa2", "b_jpg.rf.991"], "a_jpg"),
        (["00000_00000", "00000_00001", "00001_00000"], None),
        (["walk frame 1", "walk frame 2", "run_frame_1"], "walk"),
    ],
)
def test_names_give_groups(tmp_path, names, group):
    found = layouts.read(
        unequal(tmp_path, *(f"{kind}/{kind if group else ''}{n}.png" for kind in ("x", "y") for n in names))
    )
    groups = [row.group for row in found.rows if row.labels == ("x",)]
    assert len(groups) == 3 and len(set(groups)) == 2 and None not in groups
    assert layouts.read(tmp_path, Hints(group_by="none")).group_by is None


# Refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "contains no images"),
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
