"""`worldsize bench scaling` with jobs on a cluster that end at once: what it submits, follows, deletes and continues."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scaled import TINY, record
from worldsize.bench.scaling import command, jobs, measured
from worldsize.bench.scaling.measured import Measured
from worldsize.errors import UserError

ON = ("--on", "pytorchjob", "--nodes", "1,2", "--procs", "1", "--rounds", "1")
OPTIONS = ("--", "--image", "i:1", "--volume", "v")


class FakeJobs(jobs.Jobs):
    """Jobs that end at once. ``state`` is shared by all: the jobs that exist, the runs on the volume, and the commands."""

    def find(self, name):
        return self.state["jobs"].get(name)

    def _start(self, *words):
        if "--check-only" in words:
            self.state["checked"].append([*words[words.index("--on") + 1 :][:3], words[-1]])
            return subprocess.CompletedProcess(words, self.state.get("check", 0), "volume v does not exist", "")
        self.state["commands"].append(words)
        code = 0
        if words[0] == "train":
            name = words[words.index("--name") + 1]
            if self.state.get("interrupted"):
                self.state["jobs"][name] = SimpleNamespace(inactive=False)
                raise KeyboardInterrupt
            code = 2 if self.state.get("fails", "no name") in name else self.state.get("train", 0)
            self.state["jobs"][name] = SimpleNamespace(inactive=code != 1)
            # A run that is on the volume is resumed: it has nothing left to do.
            slower = 2 if words[words.index("--on") + 1] == self.state.get("slow") else 1
            self.state["runs"].setdefault(name, self.state["speed"] * slower)
        elif words[0] == "delete":
            code = self.state.get("delete", 0)
            if not code:
                self.state["jobs"].pop(words[1], None)
        elif words[0] == "cluster":
            name, file = words[3].split("/")[-2:]
            steps = [{"kind": "step"} | record(self.state["runs"][name], 0, 0, [100.0])] * 3
            text = (
                "".join(json.dumps(step) + "\n" for step in steps) + '{"kind": "st'
                if file == "metrics.jsonl"
                else json.dumps({"world_size": 1} | self.state.get("environment", {}))
            )
            Path(words[4]).write_text(text)
        return subprocess.CompletedProcess(words, code, "said", "")


@pytest.fixture
def volume(tmp_path, monkeypatch):
    """The state of `FakeJobs`, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "Jobs", FakeJobs)
    monkeypatch.setattr(
        FakeJobs, "state", {"jobs": {}, "runs": {}, "commands": [], "checked": [], "speed": 100.0}, raising=False
    )
    return FakeJobs.state


def bench(*words, tell=lambda line: None) -> list[Measured]:
    folder, _ = command.run([*map(str, TINY), *ON, *map(str, words), *OPTIONS], tell)
    return measured.read(folder.path / "results.jsonl")


def test_a_benchmark_does_not_find_the_runs_of_another(volume):
    """Runs stay on the volume, and each benchmark's folder may be runs/bench-scaling-1."""
    assert [one.step_ms for one in bench("--out", "here")] == [100, 100]
    volume["speed"] = 200.0
    assert [one.step_ms for one in bench("--out", "there")] == [200, 200]
    assert volume["jobs"] == {}
    facts = json.loads(Path("here/bench-scaling-1/bench.json").read_text())
    assert all(f"bench-scaling-1-{facts['token']}-" in name for name in list(volume["runs"])[:2])
    assert "client" in facts and "environment" not in facts  # jobs run elsewhere
    assert sorted(Path("here").glob("*/*/environment.json"))
    assert "bench-scaling-1" in Path("here/bench-scaling-1/page.html").read_text()


def test_an_incomplete_last_line_is_left_out_and_reported(volume):
    told = []
    assert len(bench(tell=told.append)) == 2
    assert sum("metrics.jsonl: 1 incomplete line not used" in line for line in told) == 2


def test_a_page_needs_altair_and_a_benchmark_does_not(volume, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    for name in [
        name for name in sys.modules if name.startswith("worldsize.report.") and name != "worldsize.report.reading"
    ]:
        monkeypatch.delitem(sys.modules, name)
    told = []
    assert len(bench(tell=told.append)) == 2
    assert any("pip install 'worldsize[report]'" in line for line in told)
    assert not list(Path("runs").glob("*/page.html"))


def test_batches_that_differ_are_reported(volume):
    told = []
    bench("--global-batch", "16", tell=told.append)  # the runs below have 64 images per step
    assert any("the run computed 64 images per step, and the recipe has 16" in line for line in told)


def test_a_lost_connection_leaves_the_job_and_resume_follows_it(volume):
    volume["train"] = 1
    with pytest.raises(UserError, match="still runs"):
        bench()
    assert len(volume["jobs"]) == 1 and [words[0] for words in volume["commands"]] == ["train"]
    volume["train"] = 0
    assert len(bench("--resume", "runs/bench-scaling-1")) == 2
    assert [words[0] for words in volume["commands"]].count("train") == 2  # one for each case
    assert "wait" in [words[0] for words in volume["commands"]] and volume["jobs"] == {}


def test_a_job_that_failed_is_deleted(volume, monkeypatch):
    volume["train"] = 2  # and the job has ended
    with pytest.raises(UserError, match="ended with 2"):
        bench()
    assert volume["jobs"] == {}


def test_what_no_job_can_run_with_is_reported_before_the_first(volume):
    volume["check"] = 2
    with pytest.raises(UserError, match=r"1 x 2, pytorchjob: its job cannot run:\nvolume v does not exist"):
        bench("--on", "local,pytorchjob", "--nodes", "1", "--procs", "1,2")
    assert volume["commands"] == [] and not Path("runs").exists()


def test_the_others_continue_after_a_job_that_failed(volume):
    told, volume["fails"] = [], "-2x1-"
    folder, code = command.run([*map(str, TINY), *ON, *OPTIONS], told.append)
    assert code == 1 and volume["jobs"] == {}
    why = "failed: ddp, weak, 2 x 1, pytorchjob, round 1: worldsize train ended with 2: said"
    assert why in (folder.path / "table.md").read_text().splitlines()
    assert "1 x 1" in (folder.path / "table.md").read_text()
    assert "2 x 1, round 1, failed: worldsize train ended with 2: said" in (folder.path / "page.html").read_text()
    first, second = (line for line in told if " of 2, round 1/1 " in line)
    assert first.startswith("1 of 2") and first.endswith("s left")
    assert second.startswith("2 of 2") and second.endswith("failed: worldsize train ended with 2: said")
    volume["fails"] = "no name"
    again, code = command.run([*map(str, TINY), *ON, "--resume", str(folder.path), *OPTIONS], told.append)
    assert code == 0 and "failed" not in (again.path / "table.md").read_text()
    assert [one.nodes for one in measured.read(again.path / "results.jsonl")] == [1, 2]


def test_ctrl_c_deletes_the_job(volume):
    volume["interrupted"] = True
    with pytest.raises(KeyboardInterrupt):
        bench()
    assert volume["jobs"] == {} and volume["commands"][-1][0] == "delete"


def test_after_ctrl_c_the_command_that_continues_is_printed(volume):
    for more in ((), ("--resume", "runs/bench-scaling-1")):  # the second one is interrupted, too
        told = []
        volume["interrupted"] = True
        with pytest.raises(KeyboardInterrupt):
            bench("--rounds", "2", *more, tell=told.append)
        printed = told[-1].removeprefix("interrupted; to continue: ")
        words = ["worldsize", "bench", "scaling", *map(str, TINY), *ON, "--rounds", "2"]
        assert shlex.split(printed) == [*words, "--resume", "runs/bench-scaling-1", *OPTIONS]
    del volume["interrupted"]
    folder, code = command.run(shlex.split(printed)[3:], told.append)
    assert (folder.path, code) == (Path("runs/bench-scaling-1"), 0)
    assert len(measured.read(folder.path / "results.jsonl")) == 4


def test_several_kinds_of_jobs_are_measured_apart(volume):
    volume["slow"] = "trainjob"
    results = bench("--on", "mpijob,trainjob")
    assert [(one.kind_of_job, one.nodes) for one in results] == [
        *(("mpijob", 1), ("mpijob", 2)),
        *(("trainjob", 1), ("trainjob", 2)),
    ]
    assert [one.efficiency for one in results] == [1, 0.5, 1, 0.5]  # each relative to its own kind
    submitted = [words for words in volume["commands"] if words[0] == "train"]
    assert [words[words.index("--on") + 1] for words in submitted] == ["mpijob", "mpijob", "trainjob", "trainjob"]
    assert len({words[words.index("--name") + 1] for words in submitted}) == 4
    assert volume["checked"] == [[kind, "--nodes", "2", "--check-only"] for kind in ("mpijob", "trainjob")]  # the largest
    text = Path("runs/bench-scaling-1/table.md").read_text()
    assert "mpijob, ddp, weak scaling: 2 processes keep" in text and "trainjob, ddp, weak scaling: 2 processes keep" in text


def test_more_processes_than_cores_have_no_efficiency(volume):
    volume["environment"] = {"cores": 1, "devices_here": 0}
    words = [*map(str, TINY), "--on", "pytorchjob", "--procs", "1,2", "--rounds", "1", *OPTIONS]
    folder, _ = command.run(words, lambda line: None)
    one, two = measured.read(folder.path / "results.jsonl")
    assert (one.efficiency, one.shares) == (1, None) and (two.efficiency, two.shares) == (None, "1 core")
    text = (folder.path / "table.md").read_text()
    assert re.search(r"\| +1 x 2, oversubscribed \|", text) and re.search(r"\| +1 x 1 \|", text) and "keep" not in text
    assert text.splitlines()[-1] == (
        "ddp, weak, 1 x 2, pytorchjob: 2 processes of a node share 1 core, which says nothing about scaling: "
        "640.00 images/s in total, no efficiency"
    )
    assert "means over 2 steps, after 1 of warm-up that did not count; rounds: 1" in text
    volume["environment"] = {"cores": 1, "devices_here": 2}  # GPUs count, if there are any
    folder, _ = command.run(words, lambda line: None)
    assert [one.shares for one in measured.read(folder.path / "results.jsonl")] == [None, None]


def test_a_job_that_cannot_be_deleted_ends_the_benchmark(volume):
    volume["delete"] = 1
    with pytest.raises(UserError, match="may still run, because it cannot be deleted: said"):
        bench()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        pytest.param(("--steps", "3"), "--steps: 2, now 3", marks=pytest.mark.slow),
        (("--model.name", "resnet34"), "--model.name: resnet18, now resnet34"),
        pytest.param(("--on", "mpijob"), "--on: pytorchjob, now mpijob", marks=pytest.mark.slow),
        (("--both",), "scaling: weak, now weak+strong"),
    ],
)
def test_resume_refuses_what_measures_something_else(volume, changed, says):
    assert len(bench()) == 2
    with pytest.raises(UserError, match=re.escape(f"runs/bench-scaling-1 measured something else: {says}.")):
        bench(*changed, "--resume", "runs/bench-scaling-1")
    assert len(bench("--rounds", "2", "--resume", "runs/bench-scaling-1")) == 4


def test_benchmarks_of_older_versions_continue(volume):
    """Their bench.json has neither token nor settings."""
    assert len(bench()) == 2
    file = Path("runs/bench-scaling-1/bench.json")
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({key: facts[key] for key in ("kind", "recipe", "command")}))
    assert len(bench("--resume", "runs/bench-scaling-1")) == 2
    with pytest.raises(UserError, match="--steps: 2, now 3"):
        bench("--steps", "3", "--resume", "runs/bench-scaling-1")
