"""``none`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from worldsize.bench.options import BenchLoader
from worldsize.config import recipe_files
from worldsize.config.command_line import Train, parse
from worldsize.slurm.options import Submit


@pytest.mark.parametrize("word", ["none", "None", "NONE"])
def test_an_optional_setting_is_unset_by_none_in_any_case(word):
    recipe = recipe_files.load("digits")
    recipe = recipe.model_copy(update={"max_steps": 3, "per_process_batch": 4})
    words = ["--max-steps", word, f"--per_process_batch={word}", "--model.weights", word, "--data.root", word]
    asked = parse(Train, [*words, "--stop-after", word], Train(recipe, stop_after=3), "train digits")
    read = asked.settings
    assert (read.max_steps, read.per_process_batch, read.model.weights, read.data.root) == (None,) * 4
    assert asked.stop_after is None


def test_none_as_a_choice_or_a_name_stays():
    recipe = recipe_files.load("digits")
    words = ["--data.train-crop", "none", "--name", "none", "--resume", "none", "--out=none"]
    asked = parse(Train, words, Train(recipe), "train digits")
    assert (asked.settings.data.train_crop, asked.name, asked.resume, asked.out) == (
        "none",
        "none",
        Path("none"),
        Path("none"),
    )


def test_options_of_jobs_and_benchmarks_are_unset_alike():
    assert parse(BenchLoader, ["--root", "x", "--workers", "none"], None, "bench loader").workers is None
    words = ["--max-steps", "none", "--timeout", "none", "--time", "none"]
    asked = parse(Submit, words, Submit(settings=recipe_files.load("digits")), "train digits --on slurm")
    assert (asked.settings.max_steps, asked.timeout, asked.job.time) == (None, None, "none")
