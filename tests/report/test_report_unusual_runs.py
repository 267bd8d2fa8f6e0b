"""`worldsize report` of runs that have no steps, have failed, or were resumed with another number of processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from browser import browse, figures
from reported import make
from worldsize.attribution.step_time import PARTS, USAGE
from worldsize.cli import main
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.report import charts, content, data, overview, reading, run_charts, statistics
from worldsize.runs.history import History
from worldsize.runs.run_folder import RunFolder
from worldsize.track import base, jsonl


def without_steps(out: Path, name: str = "zero", finished: bool = True) -> Path:
    """A run that evaluated its initial weights in 3 s, and did nothing else."""
    path = make(out, name, (), finished=False, epochs=30)
    if finished:
        tracker = jsonl.Tracker(Recipe.model_validate(recipe_files.load("digits").model_dump()).track, RunFolder(path), 0)
        tracker.epoch(base.Epoch(0, 0, None, None, 2.3, 0.1, 0.5, 360, 0, 0.0, 0.0, 3.0))
        tracker.end(None)
        (path / "result.json").write_text(json.dumps({"top1": 0.1, "best_top1": 0.1, "chain": "00", "steps": 0}))
    return path


def test_charts_without_a_value_are_left_out(tmp_path):
    """Such as the learning rate of a run without steps; Vega draws them endlessly tall."""
    page = tmp_path / "page.html"
    assert main(["report", str(without_steps(tmp_path)), "--out", str(page), "--svg", str(tmp_path / "svg")]) == 0
    # The other axes have a value, too.
    page.write_text(
        page.read_text().replace('"epoch" checked', '"epoch"').replace('value="images"', 'value="images" checked')
    )
    dom, console = browse(page, tmp_path)
    assert console == [] and list(figures(dom)) == ["loss", "top1"]
    assert "(CSV, 1 row)" in dom
    drawings = [path.read_text() for path in sorted((tmp_path / "svg").iterdir())]
    assert len(drawings) == 2 and all('height="3' in text and "e+308" not in text + dom for text in drawings)


def test_charts_show_names_that_are_no_text_as_escapes(tmp_path):
    paths = [make(tmp_path, os.fsdecode(name)) for name in (b"caf\xe9", b"b\xff")]
    page, drawings = tmp_path / "page.html", tmp_path / "svg"
    assert main(["report", *map(str, paths), "--out", str(page), "--svg", str(drawings)]) == 0
    assert r"caf\udce9" in (drawings / "loss.svg").read_text() and page.is_file()


def test_the_page_is_there_if_a_chart_cannot_be_drawn(tmp_path, monkeypatch):
    def fail(*arguments):
        raise UserError("no drawing")

    monkeypatch.setattr(charts, "svg", fail)
    page = tmp_path / "page.html"
    assert main(["report", str(make(tmp_path, "one")), "--out", str(page), "--svg", str(tmp_path / "svg")]) == 64
    assert page.is_file()


def test_a_finished_run_without_steps_evaluated_its_initial_weights(tmp_path):
    run, fresh = reading.read(without_steps(tmp_path)), reading.read(without_steps(tmp_path, "fresh", finished=False))
    assert content.of_runs([run]).notes == ["zero evaluated its initial weights."]
    assert content.of_runs([fresh]).notes == ["fresh has recorded no steps yet."]
    [evaluation] = statistics.located(run)[1]
    assert (evaluation["images"], evaluation["minutes"], evaluation["process_minutes"]) == (0, 0.05, 0.1)


def test_the_parts_of_a_step_say_which_steps_they_cover(tmp_path):
    """A resume with another number of processes leaves out what was before, as in `worldsize explain`."""
    path, whole = make(tmp_path, "a"), make(tmp_path, "b")
    times = {name: [0.0, 0.0] for name in (*PARTS, *USAGE)} | {"step_ms": [600.0, 600.0], "compute_ms": [600.0, 600.0]}
    mean = {name: sum(values) / 2 for name, values in times.items()}
    for one in (path, whole):
        windows = (base.Window(step, 9, {}, [0, 1], times, mean) for step in (9, 18))
        (one / "timing.jsonl").write_text("".join(json.dumps(asdict(window)) + "\n" for window in windows))
    for step, size in ((0, 2), (9, 4)):
        History(path / "history.jsonl").add("started", step, world_size=size)

    def said(*paths: Path) -> str:
        [table] = [table for table in data.of_runs([reading.read(one) for one in paths]) if table.name == "parts"]
        [figure] = run_charts.of_runs([table], [])
        assert figure.caption == f"{table.about.capitalize()}. `worldsize explain` says more."
        return table.about.removeprefix("milliseconds of a step on each rank, the mean over ")

    left_out = "without its first 9 steps, when it had another number of processes"
    assert said(whole) == "the run"
    assert said(path) == f"the run {left_out}"
    assert said(whole, path) == f"each run, a {left_out}"


@pytest.mark.parametrize("message", ["the loss is nan, at step 3 of 12 (lr 0.1).\nTry a lower --optimizer.lr", "no space"])
def test_a_failed_run_says_so_and_why(message, tmp_path):
    path, other = make(tmp_path, "a", (0.05,), finished=False, epochs=4), make(tmp_path, "b", seed=1)
    (path / "log.txt").write_text(f"2026-01-02 03:04:05,678 INFO worldsize.runs.run_folder: {message}\n")
    run, why = reading.read(path), message.partition(".\n")[0]
    assert overview.state(run, run.modified) == "failed"
    page = content.of_runs([run])
    assert page.verdict == (
        f"a failed after 1 of 4 epochs: {why}. Before: best top-1 5.00%. Speed: 106.6 images/s (median of steps)."
    )
    assert page.notes == []
    # It reached none of the accuracies.
    assert [table.title for table in page.tables] == ["Results"]
    assert content.of_runs([run, reading.read(other)]).notes == [f"a failed: {why}."]


def test_a_traceback_is_told_by_its_last_line(tmp_path):
    path = make(tmp_path, "a", finished=False)
    trace = "Traceback (most recent call last):\n  File x\nValueError: too few"
    (path / "log.txt").write_text(f"2026-01-02 03:04:05,678 INFO worldsize.runs.run_folder: internal error\n{trace}\n")
    assert reading.read(path).failure == "internal error: ValueError: too few"


def test_one_epoch_is_one_epoch(tmp_path):
    run = reading.read(make(tmp_path, "a", (0.5,), epochs=1, schedule={"warmup_epochs": 0}))
    assert statistics.verdict([run]).startswith("a finished 1 of 1 epoch: ")


@pytest.mark.parametrize("levels", [1, 9])
def test_aliases_of_aliases_in_a_recipe_are_refused(tmp_path, levels):
    """Ten lines could stand for billions of values, which `report` and `compare` would write out."""
    path = make(tmp_path, "bomb")
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(levels)]
    (path / "recipe.yaml").write_text("\n".join([*lines, (path / "recipe.yaml").read_text()]))
    if levels == 1:
        assert reading.read(path).recipe["a1"][8] == ["x"] * 9
        return
    with pytest.raises(UserError, match="is not the recipe of a run"):
        reading.read(path)
    with pytest.raises(UserError, match=r"has aliases \(\*NAME\) that stand for more than 100,000 values"):
        recipe_files.parse((path / "recipe.yaml").read_text(), "recipe.yaml")
    with pytest.raises(UserError, match="or for themselves"):
        recipe_files.parse("a: &a [*a]", "recipe.yaml")
