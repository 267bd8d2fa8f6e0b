"""The validation images are the ones the user means, and every command names their folder."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
from test_imagenet import kaggle  # noqa: F401 - a fixture

from folders import folder_recipe, images
from packing import packed
from processes import newest
from trees import opened, relative_names, tree, two_classes
from worldsize import cli
from worldsize.config.recipe import Data
from worldsize.data import open_dataset, open_validation
from worldsize.data.file_samples import FileSamples
from worldsize.errors import UserError

ORDER = ("val", "valid", "validation", "test")


@pytest.mark.parametrize(("used", "other"), list(itertools.combinations(ORDER, 2)))
@pytest.mark.parametrize("layout", ["folder", "imagenet", "multilabel"])
def test_the_folder_for_validation_comes_before_the_one_for_the_test(tmp_path, used, other, layout):
    root = two_classes(tmp_path / "root", used)
    tree(root, f"{other}/cat/x.png", f"{other}/dog/y.png")
    data = opened(root, layout)
    assert relative_names(data.val) == ["cat/4.png", "dog/5.png"]
    assert data.validates_on == str(root / used)
    assert data.notes == ()


@pytest.mark.parametrize("layout", ["folder", "imagenet", "multilabel"])
def test_test_images_alone_are_used_with_a_warning(tmp_path, layout):
    root = two_classes(tmp_path / "root", "test")
    (note,) = opened(root, layout).notes
    assert str(root / "test") in note and "no val, valid, validation" in note


@pytest.mark.parametrize("command", [("verify", "--root"), ("info",)])
def test_commands_about_data_name_the_folder(tmp_path, capsys, command):
    root = two_classes(tmp_path / "root", "valid")
    tree(root, "test/cat/x.png", "test/dog/y.png")
    assert cli.main(["data", *command, str(root)]) == 0
    out = capsys.readouterr().out
    assert f"  validation images: {root / 'valid'}\n" in out and "warning" not in out
    shutil.rmtree(root / "valid")
    assert cli.main(["data", *command, str(root)]) == 0
    assert f"warning: {root / 'test'} is used as validation images" in capsys.readouterr().out


def test_the_list_of_the_validation_images_is_named(tmp_path):
    root = tree(tmp_path / "root", "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
    (tmp_path / "list.txt").write_text("cat/1.png\ndog/2.png\n")
    data = opened(root, val_list=tmp_path / "list.txt")
    assert data.validates_on == f"those that {tmp_path / 'list.txt'} names"


def test_corrected_labels_keep_what_is_said_about_the_folder(tmp_path):
    root = two_classes(tmp_path / "root", "test")
    (tmp_path / "labels.csv").write_text("image,label\ncat/1.png,dog\n")
    data = opened(root, labels=tmp_path / "labels.csv")
    assert data.validates_on == str(root / "test") and len(data.notes) == 1


def validation(root: Path, name: str = "folder", **settings) -> FileSamples:
    return open_validation(Data(name=name, root=root, **settings), root.parent / "cache")


@pytest.mark.parametrize("name", ORDER)
def test_validation_images_open_without_training_images(tmp_path, name):
    root = two_classes(tmp_path / "root", name)
    complete = opened(root).val
    shutil.rmtree(root / "train")
    alone = validation(root)
    assert relative_names(alone) == relative_names(complete)
    assert (alone.classes, alone.fingerprint) == (complete.classes, complete.fingerprint)
    with pytest.raises(UserError, match="missing: train"):
        opened(root)


def test_validation_images_of_other_layouts_open_as_with_training_images(tmp_path, kaggle):  # noqa: F811
    settings = Data(name="imagenet", root=kaggle)
    expected = open_dataset(settings, tmp_path / "cache").val
    assert open_validation(settings, tmp_path / "cache").fingerprint == expected.fingerprint
    root = two_classes(tmp_path / "root")
    packed(root, tmp_path / "shards")
    assert len(validation(tmp_path / "shards")) == 2
    (tmp_path / "list.txt").write_text("cat/1.png\n")
    assert relative_names(validation(root, val_list=tmp_path / "list.txt")) == ["cat/1.png"]


def test_flat_validation_images_of_imagenet_may_be_in_a_folder_with_another_name(tmp_path):
    root = two_classes(tmp_path / "root")
    shutil.rmtree(root / "val")
    tree(root, "validation/x.png", "validation/y.png")
    (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nx,cat 1 2 3 4\ny,dog 1 2 3 4\n")
    assert opened(root, "imagenet").val.labels.tolist() == [0, 1]
    assert validation(root, "imagenet").labels.tolist() == [0, 1]


def test_a_run_names_its_folder_and_is_evaluated_on_another_without_training_images(tmp_path, monkeypatch, capfd):
    root = images(tmp_path / "images", {"cat": 12, "dog": 12}, {"cat": 3, "dog": 3})
    (root / "val").rename(root / "test")
    recipe = folder_recipe(tmp_path, root)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", recipe, "--name", "a", "--max-steps", "1"]) == 0
    out, err = capfd.readouterr()
    assert f"validation images: {root / 'test'}\n" in out
    assert err.count(f"warning: {root / 'test'} is used as validation images") == 1
    assert "is used as validation images" in Path("runs/a/log.txt").read_text()
    state = json.loads((newest(Path("runs/a")) / "state.json").read_text())
    assert state["classes"] == ["cat", "dog"]  # docs/using.md shows how other tools read it
    images(tmp_path / "other", {}, {"cat": 2, "dog": 2})
    assert cli.main(["eval", "runs/a", "--data.root", str(tmp_path / "other")]) == 0
    assert "on 4 images" in capfd.readouterr().out
