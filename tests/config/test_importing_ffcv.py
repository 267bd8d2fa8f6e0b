"""Recipes from YAML files of ffcv-imagenet that leave out keys: train_imagenet.py has its own defaults, and not ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from worldsize.config.importing.convert import Conversion, convert


def converted(folder: Path, **changes: dict[str, object]) -> Conversion:
    """A file with these sections; ``training`` says that it is one of FFCV's."""
    (folder / "given.yaml").write_text(yaml.safe_dump({"training": {"optimizer": "sgd"}} | changes))
    return convert(folder / "given.yaml", None)


def test_what_a_file_leaves_out_is_as_in_train_imagenet(tmp_path):
    recipe = converted(tmp_path).recipe()
    assert (recipe.model.name, recipe.model.blurpool) == ("resnet18", False)
    assert (recipe.epochs, recipe.micro_batch, recipe.global_batch) == (30, 512, 512)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.lr_reference_batch, optimizer.momentum) == ("sgd", 0.5, 512, 0.9)
    assert (optimizer.weight_decay, optimizer.bias_weight_decay, recipe.label_smoothing) == (4e-5, 4e-5, 0.1)
    assert (recipe.schedule.milestones, recipe.schedule.values) == ((0, 2, 30), (1e-4, 1, 0))
    assert (recipe.data.train_crop_size, recipe.data.train_crop_sizes) == (160, ())
    assert (recipe.data.val_crop_size, recipe.data.val_resize_size, recipe.data.val_mirror) == (224, 256, True)


def test_what_a_file_has_stays(tmp_path):
    recipe = converted(tmp_path, validation={"lr_tta": False}, training={"label_smoothing": 0.0, "epochs": 16}).recipe()
    assert (recipe.data.val_mirror, recipe.label_smoothing, recipe.schedule.milestones) == (False, 0, (0, 2, 16))


@pytest.mark.parametrize(
    ("resolution", "epochs"), [({}, (0, 1)), ({"start_ramp": 5, "end_ramp": 3}, (5, 6)), ({"end_ramp": 7}, (0, 7))]
)
def test_sizes_change_in_the_epochs_of_train_imagenet(tmp_path, resolution, epochs):
    """Up to start_ramp it has the smallest size, and from the epoch after that, or from end_ramp, the largest."""
    recipe = converted(tmp_path, resolution={"max_res": 192} | resolution).recipe()
    assert (recipe.data.train_crop_sizes, recipe.data.train_crop_epochs) == ((160, 192), epochs)


def test_numbers_of_another_schedule_need_no_conversion(tmp_path):
    left = converted(tmp_path, lr={"step_ratio": 0.1, "step_length": 30}).left
    assert not {"lr.step_ratio", "lr.step_length"} & left.keys()


def test_the_norm_layers_that_decay_there_are_named(tmp_path):
    """train_imagenet.py exempts what has "bn" in its name; it reads no bn_wd."""
    conversion = converted(tmp_path, training={"weight_decay": 1e-4, "bn_wd": 1})
    assert list(conversion.left) == ["training.weight_decay"]
    assert "such as those of a ResNet's shortcuts" in conversion.left["training.weight_decay"]
    optimizer = conversion.recipe().optimizer
    assert (optimizer.weight_decay, optimizer.bias_weight_decay, optimizer.norm_weight_decay) == (1e-4, 1e-4, 0)
    assert not converted(tmp_path, training={"weight_decay": 0}).left
