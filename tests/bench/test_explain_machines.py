"""Advice about processors compares the processes of one machine with the cores of that machine."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

import pytest

from worldsize.attribution import advice, causes, evidence, verdict
from worldsize.attribution.evidence import Evidence
from worldsize.attribution.step_time import PARTS, USAGE
from worldsize.config import job_pod
from worldsize.config.recipe import Recipe
from worldsize.runs.history import History
from worldsize.runs.run_folder import RunFolder
from worldsize.track.base import Window


def busy(world_size: int, cpu_ms: float, environment: dict, recipe: Recipe | None = None, part: str = "") -> Evidence:
    """A run that lost half of its time: all processes without a processor, or in this part of the step."""
    step = dict.fromkeys((*PARTS, *USAGE), 0.0) | {"step_ms": 100.0, "cpu_ms": cpu_ms}
    step |= {"compute_ms": 50.0, part: 50.0} if part else {"compute_ms": 100.0, "cpu_wait_ms": 50.0}
    one = Window(10, 10, {}, list(range(world_size)), {name: [value] * world_size for name, value in step.items()}, step)
    recorded = {"world_size": world_size, "launcher": "torchrun", **environment}
    return Evidence((recipe or Recipe()).model_dump(mode="json"), recorded, [one])


def advised(seen: Evidence) -> advice.Advice:
    loss = causes.losses(seen)[0]
    assert loss.cause in ("busy processors", "decoding")
    return advice.on(loss, seen)


def recorded(path: Path, seen: Evidence) -> RunFolder:
    run = RunFolder(path)
    run.recipe.write_text(json.dumps(seen.recipe))
    run.environment.write_text(json.dumps(seen.environment))
    run.timing.write_text(json.dumps(vars(seen.windows[0])) + "\n")
    return run


def test_two_nodes_with_a_process_each_do_not_share_the_cores_of_one():
    found = advised(busy(2, 95, {"cores": 1, "processes_here": 1}))
    assert found.why.endswith("this run's own threads keep 0.9 of 1 core of each machine busy")
    assert found.remedy == "use machines with more cores"
    # Of a larger machine, they use less than before.
    found = advised(busy(2, 65, {"cores": 1, "processes_here": 1}))
    assert found.why.endswith("this run uses 0.7 of 1 core of each machine, so others use the rest")
    assert found.remedy == "end the other programs there"


def test_fewer_processes_are_advised_where_there_are_several():
    found = advised(busy(8, 50, {"cores": 2, "processes_here": 4}))
    assert "2.0 of 2 cores of each machine busy" in found.why and found.remedy.startswith("use fewer --procs")
    found = advised(busy(4, 50, {"cores": 2, "launcher": "worldsize --procs"}))
    assert found.why.endswith("keep 2.0 of 2 cores busy") and found.remedy.startswith("use fewer --procs")


@pytest.mark.parametrize(("cpu_ms", "why"), [(78, "0.8 of 0.8 cores of each machine busy"), (50, "others use the rest")])
def test_in_a_container_with_a_limit_the_option_that_raises_it_is_named(cpu_ms: float, why: str):
    found = advised(busy(2, cpu_ms, {"cores": 1, "cpu_quota": 0.8, "processes_here": 1}))
    assert found.why.endswith(why) and "--cpu" in found.remedy and "--procs" not in found.remedy


def test_workers_are_compared_with_the_cores_of_their_machine():
    recipe = Recipe(data={"workers": 2})
    found = advised(busy(4, 10, {"cores": 4, "processes_here": 1}, recipe, "decode_ms"))
    assert found.remedy == "raise --data.workers (now 2 per process, 2 of 4 cores of each machine available)"
    found = advised(busy(4, 10, {"cores": 4, "processes_here": 2}, recipe, "decode_ms"))
    assert found.remedy.startswith("give each process more cores")


@pytest.mark.parametrize(
    ("hosts", "launcher", "expected"),
    [
        ({"a": 2, "b": 2}, "torchrun", 2),
        ({"a": 1, "b": 3}, "Slurm", 3),
        (None, "torchrun", None),
        (None, "worldsize --procs", 4),
    ],
)
def test_older_runs_have_the_processes_of_each_host_in_their_history(tmp_path: Path, hosts, launcher, expected):
    seen = busy(4, 95, {"cores": 1, "launcher": launcher})
    run = recorded(tmp_path, seen)
    History(run.history).add("started", 0, world_size=4, **({} if hosts is None else {"hosts": hosts}))
    read = evidence.read(run)
    assert read.processes_here == expected
    assert ("of each machine" in advised(read).why) == (hosts is not None)
    if expected is None:
        assert "cores busy" not in advised(read).why and "fewer processes per machine" in advised(read).remedy


def test_in_the_pods_of_a_job_no_command_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = recorded(tmp_path, busy(1, 95, {"cores": 1}))
    assert str(verdict.of(run)).endswith(f"More: worldsize explain {tmp_path}")
    monkeypatch.setattr(job_pod, "RECIPE", PurePosixPath(run.recipe))
    assert str(verdict.of(run)).endswith("cores (+100%).")
