"""Tasks for SkyPilot and dstack."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from worldsize import cli

OPTIONS = (
    *("--nodes", "2", "--procs", "8", "--gpu-type", "H100", "--cpu", "96", "--memory", "500Gi", "--env", "A=b"),
    *("--name", "r50", "--out", "/mnt/my runs", "--micro-batch", "4"),
)


def rendered(on: str, capsys: pytest.CaptureFixture[str]) -> dict:
    assert cli.main(["render", "digits", "--on", on, *OPTIONS]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_a_skypilot_task_has_the_fields_of_its_yaml(capsys):
    """Loaded by SkyPilot 0.14.1 (sky.Task.from_yaml) as two nodes with H100:8, 96 CPUs and 500 GiB."""
    task = rendered("skypilot", capsys)
    assert (task["name"], task["num_nodes"], task["envs"]) == ("r50", 2, {"A": "b"})
    assert task["resources"] == {"accelerators": "H100:8", "cpus": "96+", "memory": "500+"}
    assert task["setup"] == "pip install worldsize\n"


def test_a_dstack_task_has_the_fields_of_its_configuration(capsys):
    """Loaded by dstack 0.22.5 (parse_run_configuration) as a task of two nodes with H100:8, 96 CPUs and 500 GB or more."""
    task = rendered("dstack", capsys)
    assert (task["type"], task["name"], task["nodes"], task["env"]) == ("task", "r50", 2, {"A": "b"})
    assert task["resources"] == {"gpu": "H100:8", "cpu": "96..", "memory": "500GB.."}


@pytest.mark.parametrize(("on", "field"), [("skypilot", "run"), ("dstack", "commands")])
def test_a_node_runs_the_agent_with_the_recipe(on, field, capsys, tmp_path: Path):
    lines = rendered(on, capsys)[field]
    # dstack joins the commands of a task so (0.22.5: JobConfigurator, _join_shell_commands).
    text = lines if isinstance(lines, str) else " && ".join(lines)
    for program in ("worldsize", "pip"):
        (tmp_path / program).write_text('#!/bin/sh\nprintf "%s\\0" "$@" > words\n')
        (tmp_path / program).chmod(0o755)
    subprocess.run(["bash", "-c", text], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=60)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert words == [
        *("agent", "--id", "r50", "--procs", "8", "--", "train", "recipe.yaml", "--out", "/mnt/my runs", "--name", "r50"),
        *("--autoresume", "--retries", "3"),
    ]
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["model"]["name"] == "resnet50"


def test_what_these_launchers_cannot_do_is_refused(fails):
    assert "--gpu-type is required" in fails("render", "digits", "--on", "skypilot", "--procs", "2")
    for on in ("skypilot", "dstack"):
        options = ("--memory", "64GB", "--cpu", "500m", "--name", "my run", "--env", "A B=x", "--grace", "9", "--gpus", "0")
        said = fails("render", "digits", "--on", on, *options, "--env", "GOOD=x")
        assert "--env A B: names of variables" in said
        assert [f"--{name} " in said for name in ("memory", "cpu", "name", "env", "grace")] == [True] * 5
        assert "--gpu-type is empty" in fails("render", "digits", "--on", on, "--gpu-type", "")
    assert "dstack wants" in fails("render", "digits", "--on", "dstack", "--gpus", "0", "--name", "Run.1")
    assert "sky launch task.yaml" in fails("train", "digits", "--on", "skypilot")
