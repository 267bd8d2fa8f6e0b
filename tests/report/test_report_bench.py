"""`worldsize report` of benchmarks and plans: what it draws, also in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from browser import browse, figures, marks
from reported import bench, messages, plan
from worldsize.cli import main
from worldsize.errors import UserError
from worldsize.report import content, reading


def test_benchmarks_of_several_kinds_of_jobs_share_a_page(tmp_path):
    first, second, third = (bench(tmp_path / name) for name in "abc")
    results = (second / "results.jsonl").read_text()
    (second / "results.jsonl").write_text(
        results.replace("pytorchjob", "mpijob").replace('"efficiency": 0.8', '"efficiency": 0.6')
    )
    page = content.of_benches([reading.read_bench(first), reading.read_bench(second)])
    assert page.verdict == "Efficiency at world size 4: mpijob, ddp, weak 60.0%, pytorchjob, ddp, weak 80.0%."
    assert {row["series"] for row in page.data[0].rows} == {"pytorchjob, ddp, weak", "mpijob, ddp, weak"}
    with pytest.raises(UserError, match="both measured pytorchjob, ddp, weak"):
        content.of_benches([reading.read_bench(first)] * 2)
    (third / "results.jsonl").write_text((second / "results.jsonl").read_text())
    with pytest.raises(UserError, match=r"^b and c cannot share a page: both measured mpijob, ddp, weak;"):
        content.of_benches([reading.read_bench(one) for one in (first, second, third)])


def test_predictions_are_drawn_next_to_what_was_measured(tmp_path, capsys):
    page, file = tmp_path / "page.html", plan(tmp_path / "plan.json")
    assert main(["report", str(bench(tmp_path / "bench")), str(file), "--out", str(page)]) == 0
    assert "weak 80.0%. Predicted efficiency: 70.0% (63.0% to 77.0%) on 8 devices (plan.json)." in capsys.readouterr().out
    dom, console = browse(page, tmp_path)
    assert console == []
    drawn = figures(dom)
    # Six measurements and two predictions; median, ideal and predicted line; the band of each.
    assert [marks(drawn["scaling"], kind) for kind in ("symbol", "line", "area")] == [8, 3, 2]
    assert marks(drawn["time"], "rect") == 9  # of what was measured
    assert "<td>70 (63 to 77)</td>" in dom
    assert main(["report", str(file), "--out", str(page)]) == 0
    dom, console = browse(page, tmp_path)
    assert console == [] and marks(figures(dom)["scaling"], "symbol") == 2


def test_bandwidth_over_message_size(tmp_path, capsys):
    page, folder = tmp_path / "page.html", messages(tmp_path / "bench")
    assert main(["report", str(folder), "--out", str(page)]) == 0
    assert "gloo, 2 processes: up to 1.34 GB/s; 50 us for 1024 bytes." in capsys.readouterr().out
    dom, console = browse(page, tmp_path)
    assert console == []
    assert {name: marks(svg, "symbol") for name, svg in figures(dom).items()} == {"bandwidth": 3, "latency": 3}
    assert main(["report", str(folder), str(plan(tmp_path / "p.json")), "--out", str(page)]) == 64
    assert "p.json predicts world sizes, and bench did not measure them" in capsys.readouterr().err


def test_a_file_that_is_not_a_plan_gives_one_message(tmp_path, capsys):
    (tmp_path / "plan.json").write_text('{"format": "other"}')
    assert main(["report", str(tmp_path / "plan.json")]) == 64
    assert "is not a plan: write one with worldsize plan" in capsys.readouterr().err


@pytest.mark.parametrize("forecasts", [[{}], [None], {"devices": 8}, [{"devices": 8, "images_per_s": {"value": 1.0}}]])
def test_a_damaged_plan_gives_one_message(forecasts, tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps({"format": "worldsize plan 1", "forecasts": forecasts}))
    assert main(["report", str(tmp_path / "plan.json")]) == 64
    assert "a prediction in it is incomplete" in capsys.readouterr().err


def test_a_benchmark_in_a_browser(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(bench(tmp_path / "bench")), "--out", str(page)]) == 0
    dom, console = browse(page, tmp_path)
    assert console == []
    drawn = figures(dom)
    assert (marks(drawn["scaling"], "symbol"), marks(drawn["scaling"], "line")) == (6, 2)
    assert marks(drawn["time"], "rect") == 9
    assert re.search(r'<td class="right">2</td>.*<td class="right">91.5%</td>', dom)


def recorded(folder: Path) -> list[dict]:
    """The results of a benchmark whose runs were kept: three steps each, of which the first is warm-up and slow."""
    (folder / "bench.json").write_text(json.dumps({"kind": "scaling", "warmup": 1}))
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for result in results:
        result["run"] = f"run-{result['world_size']}-{result['round']}"
        (folder / result["run"]).mkdir()
        steps = [{"kind": "step", "images_per_s": speed} for speed in (1.0, result["images_per_s"], result["images_per_s"])]
        (folder / result["run"] / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    rewrite(folder, results)
    return results


def rewrite(folder: Path, results: list[dict]) -> None:
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))


def test_a_benchmark_shows_totals_efficiency_and_steps(tmp_path, capsys):
    folder, page = bench(tmp_path / "bench"), tmp_path / "page.html"
    recorded(folder)
    built = content.of_benches([reading.read_bench(folder)])
    _, efficiency, steps = built.data
    assert [row["images_per_s_per_process"] for row in steps.rows] == [100, 100, 91.5, 91.5, 80, 80]
    assert main(["report", str(folder), "--out", str(page)]) == 0
    dom, console = browse(page, tmp_path)
    assert console == []
    drawn = figures(dom)
    assert marks(drawn["total"], "symbol") == 6 and marks(drawn["total"], "line") == 2  # the median and the ideal
    assert marks(drawn["steps"], "line") == 3
    context = [row for row in efficiency.rows if "source" in row]
    assert marks(drawn["efficiency"], "symbol") == 6 + len(context)
    assert "published, see the table</text>" in drawn["efficiency"]
    for row in context:
        assert f'<td class="right">{row["world_size"]}</td><td class="right">{row["efficiency"]:.1%}</td>' in dom
        assert f"<td>{row['source']}</td>" in dom
    assert "Horovod, docs/benchmarks.rst" in dom
    assert "steps of warm-up at the start of each run, which do not count: 1." in dom


def test_oversubscribed_sizes_are_marked_and_have_no_efficiency(tmp_path, capsys):
    folder, page = bench(tmp_path / "bench"), tmp_path / "page.html"
    results = recorded(folder)
    rewrite(folder, [r | {"shares": "2 cores", "efficiency": None} if r["world_size"] == 4 else r for r in results])
    assert main(["report", str(folder), "--out", str(page)]) == 0
    assert "Efficiency at world size 2: pytorchjob, ddp, weak 91.5%." in capsys.readouterr().out
    dom, _ = browse(page, tmp_path)
    assert "with world size 4, the processes of a node share 2 cores. It is oversubscribed" in dom
    assert "<td>4 (oversubscribed)</td>" in dom and "2 (oversubscribed)" not in dom
    drawn = figures(dom)
    published = len([row for row in content.of_benches([reading.read_bench(folder)]).data[1].rows if "source" in row])
    assert marks(drawn["efficiency"], "symbol") == 4 + published
    assert "Crosses: oversubscribed" in dom and marks(drawn["scaling"], "symbol") == 6


def test_what_is_missing_of_a_benchmark_is_on_its_page(tmp_path, capsys):
    folder = bench(tmp_path / "bench")
    results = recorded(folder)
    failed = {key: results[0][key] for key in ("kind_of_job", "strategy", "scaling", "nodes", "procs", "world_size")}
    rewrite(folder, [*results[:5], failed | {"round": 2, "failed": "no node has enough memory"}, results[5]])
    (folder / "results.jsonl").write_text((folder / "results.jsonl").read_text()[:-30])
    notes = content.of_benches([reading.read_bench(folder)]).notes
    assert notes[0] == "bench: 1 line is incomplete in results.jsonl, as after a crash; the page shows the others."
    assert notes[1] == "bench: pytorchjob, ddp, weak, 1 x 1, round 2, failed: no node has enough memory"
