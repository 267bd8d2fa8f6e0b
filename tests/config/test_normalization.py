"""``data.mean`` and ``data.std`` are on the scale 0 to 1; those of other tools are often on the scale 0 to 255."""

from __future__ import annotations

import shutil

import pytest
import yaml

from worldsize.config import command_line, recipe_files
from worldsize.config.recipe import Data, Recipe
from worldsize.errors import UserError
from worldsize.training.request import from_arguments

MEAN, STD = ("--data.mean", "123.675", "116.28", "103.53"), ("--data.std", "58.395", "57.12", "57.375")
RIGHT = "--data.mean 0.485 0.456 0.406 --data.std 0.229 0.224 0.225"


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ((*MEAN, *STD), RIGHT),
        (MEAN, RIGHT),  # std stays that of the recipe, which is right
        (STD, RIGHT),
        (("--data.mean", "127.5", "127.5", "127.5", "--data.std", "1", "1", "1"), "0.5 0.5 0.5 --data.std 0.00392157"),
        (("--data.mean", "0", "0", "0", "--data.std", "255", "255", "255"), "--data.mean 0 0 0 --data.std 1 1 1"),
        (("--data.mean", "-123", "0.4", "0.4"), "--data.mean -0.482353 0.4 0.4 "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["train", "prove", "tune", "plan", "render --on local", "render --on slurm"])
def test_values_from_0_to_255_are_refused_with_those_that_are_right(given, remedy, command, fails):
    name, *more = command.split()
    devices = ["--devices", "8"] if name == "plan" else []
    text = fails(name, "imagenet", *more, *devices, *given)
    assert "from 0 to 255" in text and "divide by 255" in text and remedy in text


def test_a_recipe_file_is_refused_too(tmp_path, fails):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"base": "digits", "data": {"mean": [123.675, 116.28, 103.53]}}))
    assert "--data.mean 0.485 0.456 0.406" in fails("train", "r.yaml")


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"mean": (0, 0, 0), "std": (1, 1, 1)},  # no normalization
        {"mean": (0.5, 0.5, 0.5), "std": (1 / 255, 1 / 255, 1 / 255)},  # input from -127.5 to 127.5
        {"mean": (1, 1, 1), "std": (0.5, 0.5, 0.5)},
    ],
)
def test_values_from_0_to_1_are_accepted(data):
    assert Data.model_validate(data).scale_problem() is None


def test_an_older_run_still_loads(tmp_path, monkeypatch):
    """It was trained that way, and is evaluated that way; a new setting on the command line is refused."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "runs" / "r" / "recipe.yaml"
    recipe.parent.mkdir(parents=True)
    values = yaml.safe_load(recipe_files.to_yaml(recipe_files.load("digits")))
    values["data"]["mean"] = [123.675, 116.28, 103.53]
    recipe.write_text(yaml.safe_dump(values))
    (recipe.parent / "metrics.jsonl").touch()  # it has begun
    shutil.copy(recipe, tmp_path / "r.yaml")
    assert from_arguments(["--resume", "runs/r"]).recipe.data.mean[0] == 123.675
    assert from_arguments(["r.yaml", "--name", "r", "--autoresume"]).recipe.data.mean[0] == 123.675
    with pytest.raises(UserError, match="divide by 255"):
        from_arguments(["r.yaml", "--name", "other", "--autoresume"])
    with pytest.raises(UserError, match="divide by 255"):
        from_arguments(["--resume", "runs/r", *STD])
    old = Recipe.model_validate(values)
    evaluate = command_line.parse(command_line.Evaluate, [], command_line.Evaluate(old), "eval", recorded=old)
    assert evaluate.settings.data.mean[0] == 123.675
