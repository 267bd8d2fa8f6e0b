"""A list of images that a dataset would not use is refused: training on images meant to be held out would go unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from packing import packed
from trees import opened, relative_names, tree, two_classes
from worldsize.config import recipe_files
from worldsize.errors import UserError


@pytest.mark.parametrize("name", ["imagenet", "multilabel", "digits", "synthetic"])
def test_a_validation_list_for_another_layout_is_refused(name):
    with pytest.raises(UserError, match=r"val_list v\.txt: requires the name folder or cifar10"):
        recipe_files.validate({"data": {"name": name, "val_list": "v.txt"}}, "recipe")


@pytest.mark.parametrize("name", ["folder", "cifar10"])
@pytest.mark.parametrize("place", ["shards", "https://x.y/shards"])
def test_a_validation_list_for_shards_is_refused(tmp_path, name, place):
    packed(two_classes(tmp_path / "root"), tmp_path / "shards")
    root = Path(place) if "://" in place else tmp_path / place
    with pytest.raises(UserError, match=r"--data\.val-list v\.txt: .*shards.* have their own splits"):
        opened(root, name, tmp_path / "cache", val_list=Path("v.txt"))


def test_a_label_list_for_a_url_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--data\.label-list l\.csv: the shards at https://x.y/shards"):
        opened(Path("https://x.y/shards"), "folder", tmp_path / "cache", label_list=Path("l.csv"))


@pytest.mark.parametrize("name", ["folder", "cifar10"])
def test_a_validation_list_for_class_folders_is_used(tmp_path, name):
    root = tree(tmp_path / "root", "train/cat/1.png", "train/cat/2.png", "train/dog/3.png", "train/dog/4.png")
    (tmp_path / "v.txt").write_text("cat/1.png\ndog/4.png\n")
    assert relative_names(opened(root, name, val_list=tmp_path / "v.txt").val) == ["cat/1.png", "dog/4.png"]
