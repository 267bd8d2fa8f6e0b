"""`worldsize report`, `runs` and `compare`, on run folders written by the real tracker, and the page in a real browser."""

from __future__ import annotations

import html
import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from browser import browse, figures, marks
from reported import bench, make, snapshot
from worldsize.attribution.step_time import PARTS, USAGE
from worldsize.cli import main
from worldsize.report import content, data, overview, reading, statistics, timeline
from worldsize.runs.history import History
from worldsize.track import base


def test_time_counts_steps_and_evaluations(tmp_path):
    run = reading.read(make(tmp_path, "a"))
    assert statistics.time_to(run, 0.6)["minutes"] == pytest.approx((6 * 0.6 + 2 * 3) / 60)
    assert statistics.time_to(run, 0.92) is None
    assert statistics.accuracies([run]) == [0.6, 0.7, 0.75, 0.8, 0.85, 0.9]
    assert statistics.located(run)[0][-1]["images"] == 9 * 64


def test_images_of_a_batch_per_process(tmp_path):
    """Then global_batch has no meaning; without the number of processes, the speed says how many images there were."""
    path = make(tmp_path, "a", per_process_batch=128)
    assert statistics.located(reading.read(path))[0][-1]["images"] == 9 * 256
    (path / "environment.json").unlink()
    assert statistics.located(reading.read(path))[0][-1]["images"] == pytest.approx(9 * 64, rel=0.01)


def test_runs_that_differ_only_in_their_seed_become_a_band(tmp_path):
    runs = [reading.read(make(tmp_path, f"s{seed}", seed=seed)) for seed in (0, 2)]
    other = reading.read(make(tmp_path, "other", label_smoothing=0.2))
    groups = statistics.seeds([runs[0], other, runs[1]])
    assert [[run.name for run in group] for group in groups] == [["s0", "s2"], ["other"]]
    curves = data.of_runs(runs)[0]
    first = curves.rows[0]
    assert (first["loss_low"], first["loss"], first["loss_high"]) == (3.0, 4.0, 5.0)
    assert {row["series"] for row in curves.rows} == {"s0, 2 seeds"}


def test_a_band_ends_with_its_shortest_line():
    lines = [[{"step": 1, "loss": 1.0}, {"step": 2, "loss": 9.0}], [{"step": 1, "loss": 2.0}]]
    assert [(p["step"], p["loss"]) for p in statistics.band(lines, ["loss"])] == [(1, 1.5)]


def test_points_are_means_over_steps():
    steps = [{"step": i, "loss": float(i), "top1": None} for i in range(1, 6)]
    found = statistics.thinned(steps, 2)
    assert [(p["step"], p["loss"], p["top1"]) for p in found] == [(2, 1.5, None), (4, 3.5, None), (5, 5.0, None)]


def test_verdicts(tmp_path):
    a, b = (reading.read(make(tmp_path, n, t, label_smoothing=s)) for n, t, s in (("a", (0.5,), 0.1), ("b", (0.75,), 0.2)))
    assert statistics.verdict([a]) == "a finished 1 of 3 epochs: best top-1 50.00%. Speed: 106.6 images/s (median of steps)."
    assert statistics.verdict([a, b]) == "b has the best top-1, 75.00%, 25.00 points more than the next."
    c = reading.read(make(tmp_path, "c", (0.75,), label_smoothing=0.3))
    assert statistics.verdict([a, b, c]) == "b and c have the same best top-1, 75.00%."
    measured = reading.read_bench(bench(tmp_path / "bench"))
    assert statistics.verdict_of_bench(measured) == "Efficiency at world size 4: pytorchjob, ddp, weak 80.0%."


@pytest.mark.parametrize("price", ["-3", "nan", "inf"])
def test_a_price_is_not_negative(price, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(make(tmp_path, "a")), "--out", str(page), "--price-per-hour", price]) == 64
    assert f"--price-per-hour {price}: pass a price of at least 0" in capsys.readouterr().err
    assert not page.exists()


def test_the_cost_to_an_accuracy(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(make(tmp_path, "a")), "--out", str(page), "--price-per-hour", "30"]) == 0
    assert "<td>epoch 3, 0.24 min, 0.24</td>" in page.read_text()  # two processes at 30 per hour: 1 per minute


def test_a_run_of_changing_world_sizes_counts_the_processes_of_each_step(tmp_path, capsys):
    path, page = make(tmp_path, "a", per_process_batch=128), tmp_path / "page.html"
    (path / "environment.json").write_text(json.dumps({"world_size": 1, "data": {"train": "aa", "val": "bb"}}))
    starts = [{"time": 0.0, "event": "started", "step": n, "world_size": w, "hosts": {"x": w}} for n, w in ((0, 2), (6, 1))]
    (path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    run = reading.read(path)
    speed = next(table for table in data.of_runs([run]) if table.name == "speed")
    assert [row["images_per_s_per_process"] for row in speed.rows] == [53.3] * 6 + [106.6] * 3
    assert statistics.located(run)[0][-1]["images"] == 6 * 256 + 3 * 128
    assert main(["report", str(path), "--out", str(page), "--price-per-hour", "30"]) == 0
    assert "<td>epoch 3, 0.24 min, 0.2</td>" in page.read_text()  # 2 x 0.16 + 0.08 process-minutes
    assert "2, then 1" in page.read_text()


def test_the_timeline_of_a_run(tmp_path, capsys):
    path = make(tmp_path, "a")
    lines = [
        {
            "time": 1000.0,
            "event": "started",
            "step": 0,
            "command": "worldsize train digits",
            "world_size": 2,
            "hosts": {"x": 2},
        },
        {"time": 1060.0, "event": "saved", "step": 3},
        {"time": 1090.0, "event": "started", "step": 3, "world_size": 2, "hosts": {"x": 1, "y": 1}},
        {"time": 1150.0, "event": "saved", "step": 6},
        {"time": 1150.0, "event": "stopped", "step": 6, "reason": "stopped after step 6 of 9; the state is saved"},
        {"time": 1210.0, "event": "started", "step": 6, "world_size": 1, "hosts": {"y": 1}},
        {"time": 1240.0, "event": "finished", "step": 9},
    ]
    (path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = reading.read(path)
    assert timeline.attempts(run) == [
        timeline.Attempt(1000.0, 1060.0, timeline.NO_END, {"x": 2}),
        timeline.Attempt(1090.0, 1150.0, "stopped and saved", {"x": 1, "y": 1}),
        timeline.Attempt(1210.0, 1240.0, "finished", {"y": 1}),
    ]
    texts = [event.text for event in run.events]
    assert texts[:2] == ["started after step 0, 2 processes on x: worldsize train digits", "checkpoint after step 3"]
    assert texts[4] == "stopped after step 6 of 9"
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    ends = iter((1055.0, 1145.0, 1235.0))
    assert all(abs(time.time() - line["time"]) < 600 for line in metrics if line["kind"] == "epoch")
    metrics = [line | {"time": next(ends)} if line["kind"] == "epoch" else line for line in metrics]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    rows = timeline.rows(reading.read(path))
    assert [row["begin"] for row in rows if row["what"] == timeline.EVALUATION] == [55 / 60, 145 / 60, 235 / 60]
    page = tmp_path / "page.html"
    assert main(["report", str(path), "--out", str(page)]) == 0
    dom, console = browse(page, tmp_path)
    assert console == []
    drawn = figures(dom)["timeline"]
    assert (marks(drawn, "rect"), marks(drawn, "symbol")) == (4, 2 + 3)


def test_what_a_run_lost_time_to_is_on_its_page(tmp_path, capsys):
    path = make(tmp_path, "a")
    times = {name: [0.0, 0.0] for name in (*PARTS, *USAGE)} | {"step_ms": [600.0, 600.0], "cpu_ms": [450.0, 600.0]}
    times |= {"decode_ms": [150.0, 0.0], "compute_ms": [450.0, 450.0], "waiting_ms": [0.0, 150.0]}
    mean = {name: sum(values) / 2 for name, values in times.items()}
    (path / "timing.jsonl").write_text(json.dumps(asdict(base.Window(9, 9, {}, [0, 1], times, mean))) + "\n")
    page = tmp_path / "page.html"
    assert main(["report", str(path), "--out", str(page)]) == 0
    text = page.read_text()
    assert re.search(
        r'Lost time</h2>.*<td class="right">25%</td><td>all processes wait for rank 0, which decodes', text, re.S
    )
    dom, console = browse(page, tmp_path)
    assert console == [] and marks(figures(dom)["parts"], "rect") == 4
    with (path / "timing.jsonl").open("a") as file:
        file.write(json.dumps(asdict(base.Window(18, 9, {}, [0, 1], times, mean))) + "\n")
    for step, size in ((0, 2), (9, 4)):
        History(path / "history.jsonl").add("started", step, world_size=size)
    assert main(["report", str(path), "--out", str(page)]) == 0
    assert ">a, after step 9</th>" in page.read_text()


def test_a_truncated_run_is_shown_as_far_as_it_is_complete(tmp_path):
    path = make(tmp_path, "cut", finished=False)
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    run = reading.read(path)
    assert (len(run.steps), len(run.epochs), run.damaged) == (9, 2, 1)
    assert "1 line is incomplete in metrics.jsonl" in content.of_runs([run]).notes[0]


def test_of_many_ranks_the_heatmap_has_those_that_are_often_slow(tmp_path):
    path = make(tmp_path, "many")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            slow = [7, *(10 * line["step"] + at for at in range(3))]
            line |= {"rank_images_per_s": [], "slowest_ranks": {str(rank): 50.0 + rank for rank in slow}}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = next(table for table in data.of_runs([reading.read(path)]) if table.name == "ranks").rows
    assert [row["step"] for row in rows if row["rank"] == 7] == list(range(1, 10))
    assert len({row["rank"] for row in rows}) == 16
    assert all(row["images_per_s"] == 50 + row["rank"] for row in rows)


def test_different_datasets_are_refused(tmp_path, capsys):
    a, b = make(tmp_path, "a"), make(tmp_path, "b")
    (b / "environment.json").write_text(json.dumps({"data": {"train": "cc"}}))
    assert main(["report", str(a), str(b), "--out", str(tmp_path / "p.html")]) == 64
    assert "a and b have different datasets (digits aa, digits cc)" in capsys.readouterr().err
    assert not (tmp_path / "p.html").exists()


def test_different_validation_images_are_refused(tmp_path, capsys):
    """Also if the first run, of an older version, did not record its own."""
    paths = [make(tmp_path, name) for name in ("old", "a", "b")]
    for path, its in zip(paths, ({}, {"val": "bb" * 32}, {"val": "cc" * 32}), strict=True):
        (path / "environment.json").write_text(json.dumps({"data": {"train": "aa"} | its}))
    assert main(["report", *map(str, paths), "--out", str(tmp_path / "p.html")]) == 64
    expected = "a and b have different validation images (digests bbbbbbbbbbbb, cccccccccccc)"
    assert expected in capsys.readouterr().err
    assert main(["report", *map(str, paths[:2]), "--out", str(tmp_path / "p.html")]) == 0


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    places = ("a/runs", "b/runs", "c")
    paths = [make(tmp_path / place, "r", label_smoothing=0.1 * at) for at, place in enumerate(places)]
    page = content.of_runs([reading.read(path) for path in (*paths, make(tmp_path / "c", "s", label_smoothing=0.4))])
    names = ["a/runs/r", "b/runs/r", "c/r", "s"]
    assert page.title == ", ".join(names)
    assert list(dict.fromkeys(row["run"] for row in page.data[1].rows)) == names


@pytest.mark.parametrize("command", [["report"], ["compare", "."], ["runs"]])
def test_a_folder_that_is_not_a_run_gives_one_message(command, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main([*command, str(tmp_path / "empty")]) == 64
    error = capsys.readouterr().err
    assert re.search(r"is not a run folder|has no runs", error) and "Traceback" not in error


@pytest.mark.parametrize(("files", "what"), [(("export.json",), "export"), (("manifest.json", "state.json"), "checkpoint")])
def test_exports_and_checkpoints_are_no_runs(files, what, tmp_path, capsys):
    run, page = make(tmp_path / "runs", "a"), tmp_path / "page.html"
    other = make(run / "checkpoints", "other")
    for name in files:
        (other / name).write_text("{}")
    for command in (["report", str(other), "--out", str(page)], ["compare", str(run), str(other)], ["explain", str(other)]):
        assert main(command) == 64
        assert re.search(rf"{other} is an? {what}, not a run: pass the run", capsys.readouterr().err)
    assert main(["runs", str(other.parent)]) == 64
    assert "has no runs" in capsys.readouterr().err
    other.rename(tmp_path / "runs" / "other")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    assert re.findall(r"^(\w+) +(?:finished|unreadable|interrupted|running)", capsys.readouterr().out, re.M) == ["a"]


def test_states(tmp_path):
    runs = {
        name: reading.read(make(tmp_path, name, finished=name == "done")) for name in ("done", "fresh", "stopped", "bad")
    }
    now = runs["fresh"].modified + 1
    for name, line in (("stopped", "stopped after step 9 of 12"), ("bad", "the loss is NaN")):
        (tmp_path / name / "log.txt").write_text(f"2026-01-02 03:04:05,678 INFO worldsize.runs.run_folder: {line}\n")
        runs[name] = reading.read(tmp_path / name)
    assert [overview.state(run, now) for run in runs.values()] == ["finished", "running", "interrupted", "failed"]
    assert {overview.state(runs["fresh"], now + seconds) for seconds in (1000, -1000)} == {"interrupted"}
    os.utime(tmp_path / "stopped" / "log.txt", (0, now - 60))
    assert overview.state(reading.read(tmp_path / "stopped"), now) == "running"  # it was resumed
    assert runs["stopped"].events[0].text == "2026-01-02 03:04:05: stopped after step 9 of 12"


def test_each_run_counts_once_and_only_seeds_that_differ_are_seeds(tmp_path, capsys):
    runs = [make(tmp_path, f"s{seed}", seed=seed) for seed in range(2)]
    (tmp_path / "best").symlink_to(runs[0])
    page = tmp_path / "page.html"

    def verdict(*folders: Path) -> str:
        assert main(["report", *map(str, folders), "--out", str(page)]) == 0
        return capsys.readouterr().out.splitlines()[0]

    assert verdict(*runs, tmp_path / "best").startswith("2 seeds of one recipe: ")
    assert verdict(runs[0], runs[0]).startswith("s0 finished ")
    assert verdict(*runs, make(tmp_path, "again")).startswith("3 runs of one recipe: ")


def test_runs_and_compare(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    a, b, again = make(tmp_path, "a"), make(tmp_path, "b", seed=1), make(tmp_path, "again")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.yaml").write_text("[")
    assert main(["runs", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "unreadable recipe" in listed
    assert re.search(r"\ba +finished +3 of 5 +91.00% +106.6 ", listed)
    assert main(["compare", str(a), str(b)]) == 1
    assert re.search(r"seed +0 +1\b", capsys.readouterr().out)
    assert main(["compare", str(a), str(again)]) == 0


def test_compare_counts_the_packages_that_only_one_run_had(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    runs = [make(tmp_path, "a"), make(tmp_path, "b")]
    for run, packages in zip(runs, ({"timm": "1", "rich": "14"}, {"timm": "2", "six": "1", "pip": "23"}), strict=True):
        environment = json.loads((run / "environment.json").read_text())
        (run / "environment.json").write_text(json.dumps(environment | {"packages": packages}))
    assert main(["compare", *map(str, runs)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"packages.timm +1 +2\b", shown)
    assert re.search(r"packages that not all have +1 +2\b", shown)
    assert "six" not in shown


def test_the_page_in_a_browser(tmp_path, capsys):
    paths = [make(tmp_path, "a"), make(tmp_path, "s", label_smoothing=0.2)]
    before = [snapshot(path) for path in paths]
    page = tmp_path / "page.html"
    assert main(["report", *map(str, paths), "--out", str(page), "--svg", str(tmp_path / "svg")]) == 0
    assert [snapshot(path) for path in paths] == before
    assert page.stat().st_size < 3e6
    dom, console = browse(page, tmp_path)
    assert console == []  # the page's policy turns every request into an error here
    drawn = figures(dom)
    assert list(drawn) == ["loss", "top1", "lr", "norm", "speed", "time", "ranks"]
    assert marks(drawn["loss"], "line") == 4  # training and evaluation of two runs
    assert marks(drawn["speed"], "line") == 2
    assert marks(drawn["time"], "rect") == 8  # four parts of two runs
    assert marks(drawn["ranks"], "rect") == 2 * 2 * 9
    shown = re.sub(r"<script.*?</script>", "", dom, flags=re.S)
    assert shown.count('<input type="radio"') == 4  # the browser reaches these and scrolling tables with the keyboard
    assert shown.count('tabindex="0" role="region" aria-label="') == shown.count("<table>") == 7
    assert all(re.search(rf'id="chart-{name}" role="[^"]+"[^>]* aria-label="[A-Z][^"]+\.', dom) for name in drawn)
    assert 'aria-label="Loss. Dashed: validation images.' in shown
    assert all((tmp_path / "svg" / f"{name}.svg").stat().st_size > 1000 for name in drawn)


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_phones_and_screens(width, tmp_path, capsys):
    """Nothing but tables scrolls sideways, and charts are as wide as their frames."""
    page = tmp_path / "page.html"
    assert main(["report", str(bench(tmp_path / "bench")), "--out", str(page)]) == 0
    measure = (
        "<script>setTimeout(() => { const page = document.documentElement;"
        "const charts = [...document.querySelectorAll('figure')].filter(f => f.scrollWidth > f.clientWidth).length;"
        "const over = page.scrollWidth - page.clientWidth;"
        "parent.postMessage([page.clientWidth, over, charts].join(' '), '*') }, 5000)</script>"
    )
    page.write_text(page.read_text() + measure)
    # A window of the browser has at least 500 pixels.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="page.html" width="{width}" height="900" style="border: 0"></iframe>'
        '<link rel="icon" href="data:,"><script>onmessage = e => document.documentElement.lang = e.data</script>'
    )
    dom, console = browse(frame, tmp_path)
    assert console == []
    inner, over, charts = map(int, re.search(r'lang="(\d+) (\d+) (\d+)"', dom).groups())
    assert width - 20 < inner <= width  # without a scrollbar
    assert (over, charts) == (0, 0)


def test_tables_and_data_need_no_script(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(make(tmp_path, "a")), "--out", str(page)]) == 0
    text = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.S)
    assert not re.search(r"(src|href)=.?http", text)
    assert "<td>epoch 3, 0.24 min</td>" in text
    [curves] = re.findall(r'id="data-curves">(.*?)</pre>', text, re.S)
    lines = html.unescape(curves).splitlines()
    assert lines[0].startswith("series,part,images,minutes,step,epoch,loss") and len(lines) == 1 + 9 + 3


def test_the_horizontal_axis_can_be_changed(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(make(tmp_path, "a")), "--out", str(page)]) == 0
    page.write_text(
        page.read_text().replace('"epoch" checked', '"epoch"').replace('value="images"', 'value="images" checked')
    )
    dom, console = browse(page, tmp_path)
    assert console == []
    drawn = figures(dom)
    assert all(">500</text>" in drawn[name] for name in ("loss", "top1", "lr", "speed", "time"))  # of 576 images
