"""Recipes from other trainers' files that are not valid: they are printed, with what to change by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from worldsize.config import listing, recipe_files
from worldsize.config.importing import timm_images
from worldsize.config.importing.convert import convert
from worldsize.errors import UserError

TIMM = {
    "model": "resnet50",
    "opt": "sgd",
    "momentum": 0.9,
    "lr": 0.1,
    "batch_size": 64,
    "epochs": 30,
    "warmup_epochs": 5,
    "img_size": None,
    "input_size": None,
    "mean": None,
    "std": None,
}
# What args.yaml of timm's train.py since 1.0.29 always has.
SIZES = {
    "train_img_sizes": None,
    "train_batch_sizes": None,
    "train_size_probs": None,
    "train_size_schedule": "constant",
    "train_size_schedule_spread": 0.65,
    "train_size_random_mix": 0.1,
    "train_batches_per_epoch": None,
    "variable_batch_loss_scale": "none",
}
FFCV = {"training": {"epochs": 16, "batch_size": 64, "momentum": 0.9}, "lr": {"lr": 1.7, "lr_peak_epoch": 18}}


def written(folder: Path, values: dict[str, object]) -> Path:
    (folder / "given.yaml").write_text(yaml.safe_dump(values))
    return folder / "given.yaml"


def converted(folder: Path, world_size: int = 1, **changes: object):
    conversion = convert(written(folder, TIMM | changes), world_size)
    return conversion.recipe(), conversion.left


@pytest.mark.parametrize(
    ("size", "reason"), [([3, 160, 192], "square, and not 160 x 192"), ([1, 160, 160], "three channels")]
)
def test_images_that_are_not_square_or_not_rgb_are_listed_and_get_no_other_size(tmp_path, size, reason):
    conversion = convert(written(tmp_path, TIMM | {"input_size": size}), 1)
    assert list(conversion.left) == ["input_size"] and reason in conversion.left["input_size"]
    assert not [name for name in conversion.settings if name.endswith(("crop_size", "resize_size"))]


def test_a_network_whose_images_are_not_square_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        timm_images, "_defaults", lambda _: {"input_size": (3, 128, 1024), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    )
    _, left = converted(tmp_path, crop_pct=0.9, interpolation="bicubic")
    assert list(left) == ["model"] and "square, and not 128 x 1024" in left["model"]


def test_square_sizes_are_converted(tmp_path):
    recipe, left = converted(tmp_path, input_size=[3, 160, 160], crop_pct=0.8)
    assert not left
    assert (recipe.data.train_crop_size, recipe.data.val_crop_size, recipe.data.val_resize_size) == (160, 160, 200)


def test_one_mean_is_that_of_all_channels(tmp_path):
    recipe, left = converted(tmp_path, mean=[0.4], std=[0.5])
    assert not left
    assert (recipe.data.mean, recipe.data.std) == ((0.4,) * 3, (0.5,) * 3)


@pytest.mark.parametrize("opt", ["sgd", "nesterov", "momentum"])
def test_without_momentum_there_is_no_nesterov(tmp_path, opt):
    recipe, left = converted(tmp_path, opt=opt, momentum=0.0)
    assert not left
    assert (recipe.optimizer.momentum, recipe.optimizer.nesterov) == (0, False)


def test_everything_that_timm_passes_on_is_converted_or_listed(tmp_path):
    """No default is among it: false and 0 say something, too."""
    values = {"nesterov": False, "dampening": 0, "caution": False, "fused": None}
    recipe, left = converted(tmp_path, opt_kwargs=values, model_kwargs={"drop_path_rate": 0.1, "zero_init_last": False})
    assert (recipe.optimizer.nesterov, recipe.model.drop_path) == (False, 0.1)
    others = ["opt_kwargs.caution", "opt_kwargs.dampening", "opt_kwargs.fused", "model_kwargs.zero_init_last"]
    assert sorted(left) == sorted(others)
    assert set(left.values()) == {"not supported"}
    assert converted(tmp_path, opt_kwargs={}, model_kwargs={})[1] == {}


@pytest.mark.parametrize(("opt", "nesterov"), [("sgd", False), ("nesterov", False), ("momentum", True)])
def test_the_nesterov_that_timm_passes_on_replaces_that_of_the_optimizers_name(tmp_path, opt, nesterov):
    recipe, left = converted(tmp_path, opt=opt, opt_kwargs={"nesterov": nesterov})
    assert not left
    assert recipe.optimizer.nesterov is nesterov
    assert list(converted(tmp_path, opt="adamw", opt_kwargs={"nesterov": nesterov})[1]) == ["opt_kwargs.nesterov"]


def test_copies_of_an_image_need_gpus(tmp_path):
    recipe, left = converted(tmp_path, aug_repeats=3.0)
    assert recipe.augment.repeats == 1
    assert "a step has 1 on 1 GPU: if there were more, pass --world-size N" in left["aug_repeats"]
    for world_size, accumulated in ((3, 1), (2, 2)):
        recipe, left = converted(tmp_path, world_size, aug_repeats=3.0, grad_accum_steps=accumulated)
        assert not left
        assert recipe.augment.repeats == 3


def test_how_sizes_change_is_listed_only_if_they_do(tmp_path):
    assert converted(tmp_path, **SIZES)[1] == {}
    _, left = converted(tmp_path, **SIZES | {"train_img_sizes": [160, 192], "train_size_schedule": "progressive"})
    assert set(left) == {
        *("train_img_sizes", "train_size_schedule", "train_size_schedule_spread", "train_size_random_mix"),
    }
    assert set(converted(tmp_path, **SIZES | {"train_batch_sizes": [64, 32]})[1]) >= {"train_batch_sizes"}


@pytest.mark.parametrize(
    ("values", "arguments", "fault", "corrections"),
    [
        (
            TIMM | {"warmup_epochs": 30},
            (),
            "schedule.warmup_epochs 30 must be less than epochs 30: set schedule.warmup_epochs 0, "
            "or set epochs to at least 31",
            {"schedule": {"warmup_epochs": 0}},
        ),
        (TIMM | {"mean": [0.5, 0.5]}, (), "data.mean.2: Field required", {"data": {"mean": [0.5, 0.5, 0.5]}}),
        (
            FFCV,
            ("--world-size", "8"),
            "schedule.milestones (0.0, 18.0, 16.0) must be increasing",
            {"schedule": {"milestones": [0, 8, 16]}},
        ),
    ],
)
def test_a_recipe_that_is_not_valid_is_printed_with_what_to_change(tmp_path, capsys, values, arguments, fault, corrections):
    with pytest.raises(UserError) as error:
        listing.main(["import", str(written(tmp_path, values)), *arguments])
    assert error.value.exit_code == 64
    assert f"the printed recipe is not valid until you change it by hand:\n  {fault}\n" in str(error.value)
    assert "--" not in str(error.value)  # import does not have the recipe's options
    ours = tmp_path / "ours.yaml"
    ours.write_text(capsys.readouterr().out)
    assert f"#  {fault}\n" in ours.read_text()
    recipe = yaml.safe_load(ours.read_text())
    for section, settings in corrections.items():
        recipe[section] |= settings
    ours.write_text(yaml.safe_dump(recipe))
    assert recipe_files.load(str(ours)).micro_batch == 64


def test_options_in_faults_are_named_as_in_the_file():
    from worldsize.config.importing.base import Conversion

    settings = {"optimizer.name": "sgd", "optimizer.nesterov": True, "optimizer.momentum": 0.0}
    (fault,) = Conversion({}, 1, settings).faults()
    assert fault == "  optimizer: nesterov requires momentum > 0: set optimizer.nesterov to false or set momentum"


def test_lines_that_are_not_converted_are_listed_next_to_faults(tmp_path, capsys):
    with pytest.raises(UserError):
        listing.main(["import", str(written(tmp_path, TIMM | {"warmup_epochs": 30, "mixup_off_epoch": 5}))])
    out, err = capsys.readouterr()
    assert "mixup_off_epoch: 5" in err and "# Not converted:\n#  mixup_off_epoch: 5  (not supported)\n" in out
