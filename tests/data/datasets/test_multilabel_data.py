"""Images with several labels: reading both layouts, their errors, and `worldsize data` on them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trees import image_bytes, opened, put, refusal, relative_names, tree
from worldsize import cli
from worldsize.config.recipe import Data
from worldsize.data import open_layout
from worldsize.data.images.crops import CenterCrop
from worldsize.data.loading.loader import Loader
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.errors import UserError

TRAIN = "image,labels\nim/1.png,cat;dog\nim/2.png,\nim/3.png,dog; dog ;bird\n"
VAL = "image,labels\nim/4.png,dog\nim/sub/5.png,\n"
HOT = "image,cat,dog,bird\nim/1.png,1,1,0\nim/2.png,0,0,0\nim/3.png, 0,1,1 \n"


def written(root: Path, train: str = TRAIN, val: str | None = VAL) -> Path:
    tree(root, *(f"im/{name}.png" for name in ("1", "2", "3", "4", "sub/5")))
    for name, text in (("train", train), ("val", val)):
        if text is not None:
            (root / f"{name}.csv").write_text(text)
    return root


@pytest.mark.parametrize(
    "train", [TRAIN, HOT, "\ufeff" + TRAIN.replace("\n", "\r\n") + "\r\n", HOT.replace("im/1", "./im//1")]
)
def test_tables(tmp_path, train):
    data = opened(written(tmp_path / "root", train), "multilabel")
    assert data.multilabel
    assert data.classes == data.val.classes == ("bird", "cat", "dog")
    assert data.train.labels.tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 1]]
    assert data.val.labels.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert data.train.labels.dtype == np.uint8
    assert relative_names(data.train) == ["im/1.png", "im/2.png", "im/3.png"]
    assert relative_names(data.val) == ["im/4.png", "im/sub/5.png"]
    assert [data.train.image(i).getpixel((0, 0)) for i in range(3)] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert data.train.label_names(2) == ("bird", "dog")
    assert data.train.class_counts().tolist() == [1, 1, 2]


def test_both_forms_have_the_same_fingerprint_and_other_labels_another_one(tmp_path):
    listed = opened(written(tmp_path / "root"), "multilabel").train.fingerprint
    assert opened(written(tmp_path / "root", HOT), "multilabel").train.fingerprint == listed
    assert opened(written(tmp_path / "root", HOT.replace("0,0,0", "0,0,1")), "multilabel").train.fingerprint != listed


def test_a_column_without_an_image_is_a_class_too(tmp_path):
    train = HOT.replace("bird", "fish").replace("0,1,1 ", "0,1,0")
    data = opened(written(tmp_path / "root", train), "multilabel")
    assert data.classes == ("cat", "dog", "fish")
    assert data.train.class_counts().tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        (TRAIN, None, "val.csv: No such file"),
        (TRAIN, VAL.replace("dog", "dog;fly;cow"), "val.csv has labels that ROOT/train.csv does not have: cow, fly$"),
        (TRAIN, VAL.replace("dog", ""), "val.csv has no image with a label"),
        (TRAIN.partition("\n")[2], VAL, "must begin with the header `image,labels`.*'im/1.png,cat;dog'"),
        ("", VAL, "must begin with the header"),
        ("image\nim/1.png\n", VAL, "must begin with the header"),
        ("image,cat,\nim/1.png,1,1\n", VAL, "must begin with the header"),
        ("image,cat,cat\nim/1.png,1,1\n", VAL, "has two columns 'cat'"),
        (TRAIN.replace("cat;dog", "cat,dog"), VAL, "line 2 has 3 columns instead of 2; separate labels by ';'"),
        (HOT.replace("1,1,0", "1,1"), VAL, "line 2 has 3 columns instead of 4$"),
        (HOT.replace("1,1,0", "1,yes,0"), VAL, "line 2: column 'dog' has 'yes' instead of 0 or 1"),
        (TRAIN + "im/./1.png,dog\n", VAL, "line 5: im/1.png has a row already"),
        (TRAIN + "im/6.png,dog\nno/7.png,dog\n", VAL, "names 2 images not in ROOT; the first is im/6.png"),
        (TRAIN + "../out.png,dog\n", VAL, "line 5: '../out.png' is not the path of an image"),
        (TRAIN + "/etc/out.png,dog\n", VAL, "is not the path of an image"),
        (TRAIN + ",dog\n", VAL, "'' is not the path of an image"),
        (TRAIN + '"im/4.png,dog\n', VAL, "is not a CSV file"),
    ],
)
def test_bad_tables(tmp_path, train, val, message):
    root = written(tmp_path / "root", train, val)
    with pytest.raises(UserError, match=message.replace("ROOT", str(root))):
        opened(root, "multilabel")


def test_a_table_in_another_encoding(tmp_path):
    root = written(tmp_path / "root")
    (root / "train.csv").write_bytes(TRAIN.replace("cat", "Kätzchen").encode("latin-1"))
    assert "is not a CSV file in UTF-8" in refusal(root, "multilabel")


def folders(root: Path) -> Path:
    tree(root, "train/cat/1.png", "train/cat/2.png", "train/dog/3.png", "val/dog/4.png")
    put(root / "train/dog/2.png", (root / "train/cat/2.png").read_bytes())
    (root / "train/dog/1.png").symlink_to(root / "train/cat/1.png")
    return root


def test_one_folder_per_label(tmp_path):
    data = opened(folders(tmp_path / "root"), "multilabel")
    assert data.classes == ("cat", "dog")
    assert relative_names(data.train) == ["cat/1.png", "cat/2.png", "dog/3.png"]
    assert data.train.labels.tolist() == [[1, 1], [1, 1], [0, 1]]
    assert data.val.labels.tolist() == [[0, 1]]  # not every label needs a validation image
    assert data.train.image(1).getpixel((0, 0)) == (0, 255, 0)


def test_different_images_with_the_same_name_are_not_merged(tmp_path):
    root = folders(tmp_path / "root")
    put(root / "train/dog/2.png", image_bytes("red", "BMP"))
    assert "have the same name but different sizes" in refusal(root, "multilabel")


def test_folders_that_are_missing(tmp_path):
    root = tree(tmp_path / "root", "train/cat/1.png", "train/dog/2.png")
    assert "train.csv and" in refusal(root, "multilabel")
    tree(root, "val/fish/1.png")
    assert "val has labels that" in refusal(root, "multilabel")


def test_urls_and_shards_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"s3://bucket/shards: data\.name multilabel requires a folder"):
        opened(Path("s3://bucket/shards"), "multilabel", tmp_path)
    single = tree(folders(tmp_path / "a"), "val/cat/5.png")
    assert cli.main(["data", "pack", "--root", str(single), "--out", str(tmp_path / "b")]) == 0
    assert "shards, which have one label per image" in refusal(tmp_path / "b", "multilabel")


def test_the_replacement_of_a_broken_image_has_its_own_labels(tmp_path):
    root = written(tmp_path / "root")
    put(root / "im/1.png", b"broken")
    samples = opened(root, "multilabel").train
    loader = Loader(samples, CenterCrop(8, False, 8), seed=1, workers=2, prefetch=1, pin=False)
    [batch] = loader.training(BatchPlan(3, 3, 1), 0, 0)
    [evaluated] = loader.evaluation(0, 1, 3)
    loader.close()
    assert sorted(batch.indices.tolist()) == [1, 1, 2]
    assert np.array_equal(batch.labels.numpy(), samples.labels[batch.indices])
    assert np.array_equal(evaluated.labels.numpy(), samples.labels[1:])


def test_a_folder_with_tables_is_detected(tmp_path):
    assert open_layout(written(tmp_path / "root"), None, tmp_path).multilabel
    other = tree(folders(tmp_path / "other"), "val/cat/5.png")
    assert not open_layout(other, None, tmp_path).multilabel


def test_a_table_beside_class_folders_is_not_taken_for_labels(tmp_path):
    root = tree(folders(tmp_path / "root"), "val/cat/5.png")
    (root / "train.csv").write_text("id,breed\n")
    assert not open_layout(root, None, tmp_path).multilabel


def test_data_commands(tmp_path, capsys):
    root = written(tmp_path / "root")
    assert cli.main(["data", "info", str(root), "--sheet", str(tmp_path / "sheet.html")]) == 0
    out = capsys.readouterr().out
    assert "3 classes; images with several labels" in out
    assert "3 images; per class 1 to 2, median 1; smallest: bird (1), cat (1), dog (2)" in out
    sheet = (tmp_path / "sheet.html").read_text()
    assert all(f"<figcaption>{labels}<" in sheet or labels in sheet for labels in ("cat, dog", "bird, dog", "(none)"))
    (root / "train.csv").write_text(TRAIN + "im/6.png,bird;dog\n")
    for copy, original in (("2", "1"), ("6", "3")):
        put(root / f"im/{copy}.png", (root / f"im/{original}.png").read_bytes())
    assert cli.main(["data", "verify", "--root", str(root), "--report", str(tmp_path / "report.json")]) == 0
    assert "identical images with different labels (1)" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["splits"]["train"]["classes"] == {"bird": 2, "cat": 1, "dog": 3}
    assert (len(report["duplicates"]), len(report["with_different_labels"])) == (2, 1)


def test_packing_is_refused(tmp_path, fails):
    root = written(tmp_path / "root")
    assert "shards have one label per image" in fails("data", "pack", "--root", root, "--out", tmp_path / "shards")


def test_the_layout_needs_no_setting_of_its_own():
    assert Data(name="multilabel").multilabel
    assert not Data().multilabel
