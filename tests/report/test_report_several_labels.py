"""`worldsize report`, `runs` and `compare` of runs whose images have several labels: mAP judges them, not top-1."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from browser import browse, figures, marks
from reported import make
from worldsize.cli import main
from worldsize.report import content, data, measures, overview, reading, statistics


def several(out: Path, name: str, scores: tuple[float, ...] = (0.55, 0.85, 0.8), **changes: object) -> Path:
    """A run with these mAPs, whose top-1 falls where mAP rises: 90 %, 60 %, 10 %. Its F1 is 5 points below its mAP."""
    changes = {"data": {"name": "multilabel"}, "loss": {"name": "bce"}} | changes
    path = make(out, name, (0.9, 0.6, 0.1)[: len(scores)], **changes)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line, value in zip((line for line in lines if line["kind"] == "epoch"), scores, strict=True):
        line |= {"val_map": value, "val_f1": value - 0.05}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if (path / "result.json").exists():
        result = json.loads((path / "result.json").read_text())
        result |= {"map": scores[-1], "f1": scores[-1] - 0.05, "best_map": max(scores)}
        (path / "result.json").write_text(json.dumps(result))
    return path


def test_verdicts_name_the_map(tmp_path):
    a, b = (reading.read(several(tmp_path, n, (s,), label_smoothing=s / 10)) for n, s in (("a", 0.5), ("b", 0.75)))
    assert statistics.verdict([a]) == "a finished 1 of 3 epochs: best mAP 50.00%. Speed: 106.6 images/s (median of steps)."
    assert statistics.verdict([a, b]) == "b has the best mAP, 75.00%, 25.00 points more than the next."
    seeds = [reading.read(several(tmp_path, f"s{seed}", (0.5 + seed / 4,), seed=seed)) for seed in range(2)]
    assert statistics.verdict(seeds) == "2 seeds of one recipe: best mAP 62.50% on average, 50.00% to 75.00%."


def test_the_tables_of_a_page(tmp_path):
    page = content.of_runs([reading.read(several(tmp_path, "a"))], price_per_hour=30)
    results, times = (table.rows for table in page.tables[:2])
    scores = ("best mAP", "last mAP", "last F1")
    assert results[0] == ("run", "seed", "processes", "epochs", *scores, "last loss", "median images/s", "minutes")
    assert results[1][4:7] == ("85.00%", "80.00%", "75.00%")
    assert times[0] == ("mAP", "a")
    # Top-1 reached 50 % and all below 90 % in epoch 1.
    assert times[-1] == ("85%", "epoch 2, 0.16 min, 0.16")
    assert ("50%", "epoch 1, 0.08 min, 0.08") in times


def test_the_curves_are_map_and_f1(tmp_path, capsys):
    paths, page = [several(tmp_path, "a"), several(tmp_path, "b", label_smoothing=0.3)], tmp_path / "page.html"
    assert main(["report", *map(str, paths), "--out", str(page), "--svg", str(tmp_path / "svg")]) == 0
    assert capsys.readouterr().out.startswith("a and b have the same best mAP, 85.00%.")
    text = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.S)
    assert ">mAP<" in text
    assert not re.search(r"(best|last) top-1|Top-1 accuracy", text)
    curves = data.of_runs([reading.read(path) for path in paths])[0]
    assert [row["map"] for row in curves.rows if row["part"] == "evaluation"] == [0.55, 0.85, 0.8] * 2
    dom, console = browse(page, tmp_path)
    drawn = figures(dom)
    assert console == [] and list(drawn)[:4] == ["loss", "map", "f1", "lr"]
    assert marks(drawn["map"], "line") == marks(drawn["f1"], "line") == 2
    assert {"map.svg", "f1.svg"} < {path.name for path in (tmp_path / "svg").iterdir()}


def test_before_the_first_evaluation(tmp_path):
    path = several(tmp_path, "a", finished=False)
    lines = [line for line in (path / "metrics.jsonl").read_text().splitlines() if '"step"' in line.split(",")[0]]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    page = content.of_runs([reading.read(path)])
    assert "no evaluation yet" in page.verdict
    assert "best mAP" in page.tables[0].rows[0]
    assert [figure.name for figure in page.figures][:2] == ["loss", "lr"]


def test_a_page_with_both_kinds_names_the_metric_of_each(tmp_path):
    """A run of an older version recorded no mAP."""
    old = make(tmp_path, "old", data={"name": "multilabel"}, loss={"name": "bce"})
    page = content.of_runs([reading.read(old), reading.read(several(tmp_path, "new"))])
    speed = "Speed: 106.6 images/s (median of steps)."
    assert page.verdict.startswith(
        f"old finished 3 of 5 epochs: best top-1 91.00%. {speed} new finished 3 of 5 epochs: best mAP 85.00%. {speed}"
    )
    results, times = (table.rows for table in page.tables[:2])
    titles = ("best top-1", "last top-1", "best mAP", "last mAP", "last F1")
    assert results[0][4:9] == titles
    assert [row[4:9] for row in results[1:]] == [("91.00%", "91.00%", "", "", ""), ("", "", "85.00%", "80.00%", "75.00%")]
    assert times[0] == ("accuracy", "old", "new")
    assert ("top-1 90%", "epoch 3, 0.24 min", "") in times and ("mAP 85%", "", "epoch 2, 0.16 min") in times
    assert [figure.name for figure in page.figures][1:4] == ["top1", "map", "f1"]


def test_runs_lists_the_best_map(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    several(tmp_path, "a")
    assert main(["runs", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "best mAP" in listed and "top-1" not in listed
    assert re.search(r"\ba +finished +3 of 5 +85.00% +106.6 ", listed)
    make(tmp_path, "digits")
    titles, *rows = overview.table(tmp_path, 0.0)
    assert titles[3] == "best"
    assert {row[0]: row[3] for row in rows} == {"a": "mAP 85.00%", "digits": "top-1 91.00%"}


@pytest.mark.parametrize("finished", [True, False])
def test_compare_shows_where_they_differ(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    scores = {"a": (0.55, 0.85, 0.8), "b": (0.55, 0.75, 0.7)}
    a, b = (several(tmp_path, name, its, finished=finished) for name, its in scores.items())
    assert main(["compare", str(a), str(b)]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"best_map +0.85 +0.75\b", shown)
    assert bool(re.search(r"\bmap +0.8 +0.7\b", shown)) == bool(re.search(r"\bf1 +0.75 +0.6", shown)) == finished
    assert "top1" not in shown


def test_results_of_older_versions_have_no_map(tmp_path):
    old, new = make(tmp_path, "old"), make(tmp_path, "new")
    result = json.loads((new / "result.json").read_text()) | {"map": None, "f1": None, "best_map": None}
    (new / "result.json").write_text(json.dumps(result))
    assert main(["compare", str(old), str(new)]) == 0
    assert measures.of(reading.read(new)) == measures.TOP1
