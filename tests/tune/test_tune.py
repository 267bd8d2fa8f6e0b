"""`worldsize tune`: the curve of a range test, the learning rates of its runs, and the same answer for any world size."""

from __future__ import annotations

import math
import os
import re
import xml.dom.minidom
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eight_steps import EIGHT_STEP_BATCHES
from paths import ENDED_NETWORK
from processes import worldsize
from worldsize.cli import main
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.errors import UserError
from worldsize.optim import schedules
from worldsize.reproduce.training_process import ComputationFailed
from worldsize.tune import batches, chart, command, curve, runs


def descent(rates: list[float], curvature: float = 2.0) -> list[float | None]:
    """Losses of gradient descent on curvature / 2 * x**2, which diverges above a rate of 2 / curvature."""
    x, losses = 5.0, []
    for rate in rates:
        losses.append(curvature / 2 * x * x + 1)
        x -= rate * curvature * x
    return losses


@given(st.floats(0.1, 100))
def test_on_a_quadratic_the_suggestion_converges(curvature):
    rates = curve.geometric(1e-5, 100.0, 100)
    found = curve.smoothed(rates, descent(rates, curvature))
    assert 1e-3 / curvature < found.suggested < 2 / curvature


def test_the_average_is_corrected_for_its_start():
    found = curve.smoothed([1.0, 2.0, 4.0], [3.0, 3.0, 3.0])
    assert found.losses == pytest.approx([3.0, 3.0, 3.0])
    first, second = curve.smoothed([1.0, 2.0], [3.0, 2.0]).losses
    assert (first, second) == (pytest.approx(3.0), pytest.approx((0.9 * 3 + 2) / 1.9))


def test_the_chart_is_xml_whatever_the_title():
    drawn = chart.svg(curve.smoothed([1.0, 2.0, 4.0], [3.0, 2.0, 1.0]), 2.0, "a <b> & c.yaml")
    texts = xml.dom.minidom.parseString(drawn).getElementsByTagName("text")
    assert texts[0].firstChild.data == "a <b> & c.yaml"


@pytest.mark.parametrize("chosen", [0.01, 2.0, 90.0])
def test_the_chart_shows_the_chosen_rate_also_beyond_the_range(chosen):
    drawn = chart.svg(curve.smoothed([1.0, 2.0, 4.0], [3.0, 2.0, 1.0]), chosen, "title")
    paths = xml.dom.minidom.parseString(drawn).getElementsByTagName("path")
    [line] = [path.getAttribute("d") for path in paths if path.getAttribute("stroke-dasharray")]
    assert chart._LEFT <= float(line[1:].split()[0]) <= chart._WIDTH - chart._RIGHT


@pytest.mark.parametrize("wild", [None, math.inf, math.nan, 1e9])
def test_the_curve_ends_where_the_loss_diverges(wild):
    assert curve.smoothed([1.0, 2.0, 4.0, 8.0], [3.0, 2.0, wild, 1.0]).rates == [1.0, 2.0]


def test_a_loss_that_is_never_finite_is_an_error():
    with pytest.raises(ValueError, match="not finite from the start"):
        curve.smoothed([1.0, 2.0], [None, 1.0])


@pytest.mark.parametrize(
    ("rate", "expected"), [(0.0123, 0.01), (0.09, 0.1), (2.4, 2), (3.8, 3), (5.5e-4, 5e-4), (0.65, 0.7)]
)
def test_rates_are_rounded(rate, expected):
    assert curve.rounded(rate) == expected


@given(st.integers(1, 400), st.lists(st.floats(1e-6, 10), min_size=20, max_size=60))
def test_each_step_of_a_run_has_its_rate(steps_per_epoch, rates):
    base = recipe_files.load("imagenet-tv-v2").model_copy(update={"max_steps": 3})
    recipe = runs.with_rates(base, rates, steps_per_epoch)
    peak = schedules.peak_lr(recipe.optimizer, recipe.global_batch)
    used = [peak * schedules.factor(recipe.schedule, i, steps_per_epoch, recipe.epochs) for i in range(len(rates))]
    assert used == pytest.approx(rates)
    assert recipe.augment == base.augment and recipe.average.name == "none"
    assert recipe.epochs * steps_per_epoch >= len(rates) and recipe.max_steps is None


def test_a_short_run_ends_before_the_frozen_parts_train():
    recipe = Recipe(epochs=10, model={"freeze": ("backbone",), "unfreeze_epoch": 5})
    assert runs.with_rates(recipe, [0.1] * 20, 10).model.unfreeze_epoch is None
    assert runs.with_rates(recipe, [0.1] * 20, 2).model.unfreeze_epoch == 5


def test_the_rate_is_for_the_batch_that_training_scales_it_to(tmp_path):
    """Adasum's for the samples of one process."""
    values = {"data": {"name": "digits"}, "global_batch": 64, "micro_batch": 16, "device": "cpu"}
    for strategy, batch in {"ddp": 64, "adasum": 32}.items():
        recipe = recipe_files.validate(values | {"parallel": {"strategy": strategy}}, "test")
        asked = command.Tune(recipe, procs=2)
        place = command._place(asked, tmp_path)
        text = command._yaml(0.1, None, asked, place, "digits")
        assert yaml.safe_load(text)["optimizer"]["lr_reference_batch"] == batch


@pytest.mark.parametrize(("after", "reported"), [(0, False), (1, False), (2, True), (100, True)])
def test_runs_that_end_before_the_local_steps_say_so(monkeypatch, capsys, after, reported):
    """Of 10 steps per epoch, as the recipe cifar10-postlocal has 100 epochs without local steps."""

    def fail(*arguments):
        raise UserError("no run is needed")

    monkeypatch.setattr(command, "_place", lambda asked, folder: runs.Workplace(folder, 2, BatchPlan(64, 32, 2), 10))
    monkeypatch.setattr(command, "tune", fail)
    settings = ("--parallel.strategy", "localsgd", "--parallel.local-after", str(after), "--procs", "2", "--steps", "20")
    assert main(["tune", "digits", *settings]) == 64
    line = f"all 20 steps are synchronous, because local steps begin after {after} epochs"
    assert (line in capsys.readouterr().out) == reported


def test_a_short_run_rises_and_falls():
    rates = runs.triangle(2.0, 10)
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25])


def test_more_runs_follow_if_the_best_is_at_the_edge():
    assert command._beyond({0.1: 2.0, 0.3: 1.5, 1.0: 1.0}) == [3]
    assert command._beyond({0.1: 1.0, 0.3: 1.5, 1.0: None}) == [0.03]
    assert command._beyond({0.1: 2.0, 0.3: 1.5, 1.0: None}) == []
    assert command._beyond({0.1: None, 0.3: None}) == [0.01]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "worldsize tune"),
        (("digits", "--steps", "5"), "at least 20 steps"),
        (("digits", "--low", "1", "--high", "0.1"), "--low 1 and --high 0.1: both must be between"),
        (("digits", "--high", "inf"), "--low 0.0001 and --high inf: both must be between"),
        (("digits", "--low", "nan"), "--low nan and --high 10: both must be between"),
        (("digits", "--low", "1e-10", "--high", "1e300"), "--low 1e-10 and --high 1e+300: both must be between"),
        (("digits", "--out", "there.yaml"), "already exists"),
        (("digits", "--out", "curve.yaml"), "curve.svg already exists"),
        (("digits", "--out", "a.svg"), "--out a.svg would be both the recipe and its curve: pass a.yaml"),
        (("digits", "--out", "imagenet"), "--out imagenet is the name of a shipped recipe"),
        (("digits", "--out", "missing/a.yaml"), "--out missing/a.yaml: no such folder"),
        (("digits", "--micro-batches", "many"), "such as 16,32,64"),
        (("digits", "--procs", "2", "--parallel.strategy", "async"), "tune needs a strategy with synchronous steps"),
    ],
)
def test_mistakes_are_explained(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").touch()
    Path("curve.svg").touch()
    assert main(["tune", *arguments]) == 64
    assert message in capsys.readouterr().err


def test_a_recipe_that_the_new_one_cannot_name_is_refused_before_the_runs(fails, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "tune", lambda *arguments: pytest.fail("it trains"))
    folder = tmp_path / os.fsdecode(b"d\xff")
    folder.mkdir()
    (folder / "m.yaml").write_text("base: digits\n")
    assert r"d\xff/m.yaml': the name is not UTF-8: rename the folder" in fails("tune", folder / "m.yaml", "--out", "t.yaml")
    assert os.listdir(tmp_path) == [folder.name]


def test_the_new_recipe_names_data_in_a_folder_that_is_not_utf8(tmp_path, monkeypatch):
    found = curve.smoothed([1.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    monkeypatch.setattr(command, "tune", lambda *_: command.Tuned(found, {1.0: 3.0, 2.0: 1.0, 4.0: 2.0}))
    monkeypatch.chdir(tmp_path)
    root = os.fsdecode(b'/data/\xff "\\')
    assert main(["tune", "digits", "--data.root", root, "--out", "new.yaml"]) == 0
    assert recipe_files.load("new.yaml").data.root == Path(root)


def test_a_range_test_that_is_stopped_finds_no_rate(fails, tmp_path, monkeypatch):
    monkeypatch.setenv("EARLY_SIGNAL", "SIGTERM")
    small = (*EIGHT_STEP_BATCHES, "--model.name", ENDED_NETWORK)
    said = fails("tune", "digits", *small, "--steps", "20", code=75)
    assert re.search(r"the training was stopped after step \d of 20: there is no verdict", said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [("out of GPU memory: a forward pass of 32 images is too large", 64), ("killed", 137)])
def test_forward_batches_are_tried_until_one_does_not_fit(monkeypatch, failure):
    tried = []

    def records(place, recipe, name, steps):
        tried.append(recipe.forward_batch)
        assert recipe.max_steps is None and recipe.epochs >= steps  # enough steps to measure, with any data
        if recipe.forward_batch > 16:
            raise ComputationFailed(*failure)
        return [{"images_per_s": 100.0 if recipe.forward_batch == 8 else 90.0}] * steps

    monkeypatch.setattr(runs, "records", records)
    place = runs.Workplace(Path(), 1, BatchPlan(64, 4, 1), 10)
    found = batches.forward_batches(place, Recipe(global_batch=64, micro_batch=4, epochs=1, max_steps=3), place.plan, print)
    assert tried == [4, 8, 16, 32]
    assert found == {4: 90.0, 8: 100.0, 16: 90.0, 32: None}
    assert batches.fastest(found) == 8
    assert batches.table(found)[-1] == ("32", "does not fit")


def test_a_run_that_diverges_at_once_has_no_speed(monkeypatch):
    monkeypatch.setattr(runs, "records", lambda *_: [{"images_per_s": 100.0}])
    place = runs.Workplace(Path(), 1, BatchPlan(64, 4, 1), 10)
    with pytest.raises(UserError, match=r"not finite with --optimizer\.lr 0\.1"):
        batches.micro_batches(place, Recipe(global_batch=64), "16,16", print)


def test_each_micro_batch_is_measured_once(monkeypatch):
    monkeypatch.setattr(batches, "_speed", lambda place, recipe, **changes: float(changes["micro_batch"]))
    place = runs.Workplace(Path(), 1, BatchPlan(64, 4, 1), 10)
    rows = batches.micro_batches(place, Recipe(global_batch=64), "32,16,32", print)
    assert rows[1:] == [("32", "32.0"), ("16", "16.0")]


@pytest.mark.slow
def test_the_fastest_forward_batch_is_in_the_recipe(tmp_path):
    small = ("--model.name", "resnet18", "--data.train-crop-size", "16", "--data.val-crop-size", "16", "--steps", "20")
    more = ("--data.val-resize-size", "16", "--global-batch", "16", "--micro-batch", "4", "--low", "0.01", "--high", "1")
    ended = worldsize("tune", "digits", *small, *more, "--forward-batches", "--out", "tuned.yaml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    tuned = recipe_files.load(str(tmp_path / "tuned.yaml"))
    assert tuned.forward_batch in (4, 8, 16) and tuned.micro_batch == 4
    assert f"forward batch {tuned.forward_batch}, the fastest" in ended.stdout


@pytest.mark.slow
def test_every_world_size_finds_the_same_rate(tmp_path):
    small = ("--model.name", "resnet18", "--precision", "fp64", "--data.train-crop-size", "16", "--data.val-crop-size", "16")
    more = (*small, "--data.val-resize-size", "16", "--global-batch", "32", "--micro-batch", "16", "--steps", "20")
    for procs in ("1", "2"):
        ended = worldsize("tune", "digits", *more, "--procs", procs, "--out", f"{procs}.yaml", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    one, two = ((tmp_path / f"{procs}.yaml").read_text().partition("\n")[2] for procs in ("1", "2"))
    assert one == two and (tmp_path / "1.svg").read_text() == (tmp_path / "2.svg").read_text()
    recipe = recipe_files.load(str(tmp_path / "1.yaml"))
    assert recipe.optimizer.lr_reference_batch == recipe.global_batch == 32
    assert recipe.model_copy(update={"optimizer": Recipe().optimizer}).model.name == "resnet18"
    assert 1e-4 < recipe.optimizer.lr < 10
