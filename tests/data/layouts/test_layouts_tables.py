"""Reading labels from tables and lists, and from tables next to folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layout_trees import IDS, four, labels, numbered, refusal, splits, unequal, written
from trees import put
from worldsize.data import layouts
from worldsize.data.layouts import Hints


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


@pytest.mark.parametrize(
    ("numbers", "classes"),
    [
        ("0123", ["bird", "cat", "dog", "fox"]),
        ("1234", ["bird", "cat", "dog", "fox"]),
        ("0101", ["cat", "dog"]),
        ("2424", ["dog", "fox"]),
        ("1231", ["1", "2", "3"]),  # cat, dog and bird, or dog, bird and fox
    ],
)
def test_numbers_keep_their_place_in_a_list_of_names(tmp_path, numbers, classes):
    table = "id,label\n" + "".join(f"{name},{number}\n" for name, number in zip(IDS, numbers, strict=True))
    found = layouts.read(written(four(tmp_path), train_csv=table, classes_txt="cat\ndog\nbird\nfox\n"))
    assert found.classes == classes
    unclear = "the classes keep their numbers: classes.txt may count from 0 or from 1"
    assert (unclear in found.notes) == (classes == ["1", "2", "3"])


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
