"""`data.label_list`: one table of images, labels and splits; its errors; the same numbers as from folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trees import image_bytes, opened, relative_names, tree, two_classes
from worldsize.config import recipe_files
from worldsize.data.datasets import label_list
from worldsize.data.datasets.label_list import Entry
from worldsize.errors import UserError

ROWS = "file,label,split\na/1.png,cat,train\n2.png,dog,train\na/b/3.png,dog,val\n4.png,cat,test\n"


def written(root: Path, text: str = ROWS) -> Path:
    tree(root, "a/1.png", "2.png", "a/b/3.png", "4.png")
    (root.parent / "labels.csv").write_text(text)
    return root


def test_one_label_per_image(tmp_path):
    data = opened(written(tmp_path / "root"), label_list=tmp_path / "labels.csv")
    assert (data.classes, data.multilabel) == (("cat", "dog"), False)
    assert (relative_names(data.train), data.train.labels.tolist()) == (["a/1.png", "2.png"], [0, 1])
    assert (relative_names(data.val), data.val.labels.tolist()) == (["a/b/3.png"], [1])
    assert data.train.labels.dtype == np.int32
    assert bytes(data.val.encoded(0)) == image_bytes("blue")


def test_several_labels_have_a_row_each(tmp_path):
    text = "file,label,split\n2.png,dog,train\n2.png,cat,train\na/1.png,,train\n2.png,dog,train\n4.png,dog,val\n"
    data = opened(written(tmp_path / "root", text), "multilabel", label_list=tmp_path / "labels.csv")
    assert (data.classes, data.multilabel) == (("cat", "dog"), True)
    assert (relative_names(data.train), data.train.labels.tolist()) == (["2.png", "a/1.png"], [[1, 1], [0, 0]])
    assert data.val.labels.tolist() == [[0, 1]]


def test_what_is_written_is_read(tmp_path):
    odd = 'comma, "quote"\nline\u2028 é'
    entries = [Entry(f"{odd}.png", ("x;y", " b"), "train"), Entry("\udcff.png", (), "val"), Entry("c.png", ("=1",), "test")]
    (tmp_path / "list.csv").write_bytes(label_list.write(entries))
    assert label_list.read(tmp_path / "list.csv", several=True) == entries


def test_a_list_of_the_folders_has_their_order_and_labels(tmp_path):
    root = two_classes(tmp_path / "root")
    folders = opened(root)
    entries = [
        Entry(f"{split}/{samples.path(i)}", samples.label_names(i), split)
        for split, samples in (("train", folders.train), ("val", folders.val))
        for i in range(len(samples))
    ]
    (tmp_path / "list.csv").write_bytes(label_list.write(entries))
    listed = opened(root, label_list=tmp_path / "list.csv")
    assert listed.classes == folders.classes
    for one, other in ((listed.train, folders.train), (listed.val, folders.val)):
        assert one.labels.tolist() == other.labels.tolist()
        assert [one.name(i) for i in range(len(one))] == [other.name(i) for i in range(len(other))]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("file,label", "image,label", "must begin with the line file,label,split; it begins with 'image,label,split'"),
        ("2.png,dog,train", "2.png,dog", "line 3 has 2 columns instead of 3"),
        ("2.png", "../2.png", "line 3: '../2.png' is not the path of an image relative to"),
        ("dog,train", "dog,valid", "line 3: split 'valid' must be train, val or test"),
        ("2.png,dog", "2.png,", "line 3: 2.png has no label"),
        ("2.png,dog", "a/1.png,dog", "line 3: a/1.png has a label already, 'cat': images with several need data.name"),
        ("2.png,dog,train", "a/1.png,dog,val", "a/1.png is in the split val here and in train above"),
        ("4.png", "5.png", "names 1 image not in"),
        ("dog,val", "dog,test", "names no image with the split val"),
        ("dog,val", "cow,val", "labels that the training split does not have: cow"),
        ("dog,train", "cat,train", "only the label 'cat' in the training split"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path, old, new, message):
    assert old in ROWS
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        opened(written(tmp_path / "root", ROWS.replace(old, new, 1)), label_list=tmp_path / "labels.csv")


def test_a_missing_list_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--data.label-list gone.csv: No such file"):
        opened(written(tmp_path / "root"), label_list=Path("gone.csv"))


@pytest.mark.parametrize("more", [{"val_list": "v.txt"}, {"name": "cifar10"}])
def test_settings_that_contradict_the_list_are_refused(more):
    with pytest.raises(UserError, match=r"label_list l\.csv: "):
        recipe_files.validate({"data": {"label_list": "l.csv", **more}}, "recipe")
