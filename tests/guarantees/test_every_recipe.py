"""Every shipped recipe trains on small images, with the same numbers in one process and in two that were interrupted."""

from __future__ import annotations

import shutil

import pytest

from processes import average_of, distance, losses, newest, weights
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe

SMALL = {
    "data.name": "synthetic",
    "data.samples": "8",
    "data.classes": "4",
    "data.train-crop-size": "16",
    "data.val-crop-size": "16",
    "data.val-resize-size": "18",
    "global-batch": "8",
    "micro-batch": "4",
    "precision": "fp64",
    "device": "cpu",
}
# Each copy of an image needs a micro-batch of its own.
REPEATED = {"data.samples": "16", "global-batch": "16"}
DEEP = {"data.train-crop-size": "32", "data.val-crop-size": "32", "data.val-resize-size": "32"}
GROWING = {"data.train-crop-sizes": "12 16", "data.train-crop-epochs": "0 1", "data.train-crop-step": "4"}
TEXTS = {"about", "reaches", "source", "differs", "reproduced", "claimed_top1"}
LENGTHS = {"epochs", "schedule.milestones", "data.train_crop_epochs"}


def kinds() -> list[str]:
    """One recipe of each kind: a kind's recipes differ in nothing but their length."""
    found: dict[str, str] = {}
    for name in recipe_files.names():
        values = recipe_files.load(name).model_dump()
        for path in TEXTS | LENGTHS:
            *sections, last = path.split(".")
            (values[sections[0]] if sections else values).pop(last)
        found.setdefault(repr(values), name)
    return list(found.values())


def small(recipe: Recipe) -> list[str]:
    settings = SMALL | (GROWING if recipe.data.train_crop_sizes else {}) | (REPEATED if recipe.augment.repeats > 1 else {})
    settings |= DEEP if recipe.model.name.startswith("convnext") else {}
    settings |= {"model.weights": "None"} if recipe.model.weights else {}  # they would be downloaded
    return [word for name, value in settings.items() for word in (f"--{name}", *value.split())] + ["--checkpoint.no-best"]


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds())
def test_two_steps(ranks, name):
    recipe = recipe_files.load(name)
    alone = () if recipe.parallel.strategy == "auto" else ("--parallel.strategy", "single", "--parallel.local-after", "0")
    ranks(1).run("train", name, *small(recipe), "--max-steps", "2", "--name", f"{name}-1", *alone)
    ranks(2).run("train", name, *small(recipe), "--max-steps", "1", "--name", f"{name}-2")
    single, both = ranks.cwd / "runs" / f"{name}-1", ranks.cwd / "runs" / f"{name}-2"
    assert newest(both).name == "step-00000001"
    ranks(2).run("train", "--resume", both, "--max-steps", "2")
    assert losses(both) == pytest.approx(losses(single), rel=1e-6)
    assert distance(weights(both), weights(single)) < 1e-8
    if recipe.average.name != "none":
        assert distance(average_of(both), average_of(single)) < 1e-8


@pytest.fixture(autouse=True)
def no_runs_left(ranks):
    """The checkpoints of all recipes together would be tens of gigabytes."""
    yield
    shutil.rmtree(ranks.cwd / "runs", ignore_errors=True)


def test_the_shorter_ffcv_recipes_are_of_one_kind():
    assert [name for name in kinds() if "ffcv" in name] == ["imagenet-ffcv-rn18-16", "imagenet-ffcv-rn50-16"]
