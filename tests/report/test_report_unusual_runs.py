"""`worldsize report` of runs that have no steps, have failed, or were resumed with another number of processes."""

from __future__ import annotations

import json
from pathlib import Path

from browser import browse, figures
from reported import make
from worldsize.cli import main
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.report import content, reading, statistics
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
    drawings = [path.read_text() for path in sorted((tmp_path / "svg").iterdir())]
    assert len(drawings) == 2 and all('height="3' in text and "e+308" not in text + dom for text in drawings)


def test_a_finished_run_without_steps_evaluated_its_initial_weights(tmp_path):
    run, fresh = reading.read(without_steps(tmp_path)), reading.read(without_steps(tmp_path, "fresh", finished=False))
    assert content.of_runs([run]).notes == ["zero evaluated its initial weights."]
    assert content.of_runs([fresh]).notes == ["fresh has recorded no steps yet."]
    [evaluation] = statistics.located(run)[1]
    assert (evaluation["images"], evaluation["minutes"], evaluation["process_minutes"]) == (0, 0.05, 0.1)
