"""What a run says in the pods of a job, where its user cannot type commands: no paths that exist only there."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest

from paths import SMALL_NETWORK
from worldsize import cli
from worldsize.cluster.manifests.spec import RECIPE
from worldsize.config import job_pod

MODEL = ("--model.name", SMALL_NETWORK, "--global-batch", "32", "--micro-batch", "32", "--max-steps", "2")
AGAIN = "the same `worldsize train --on ...` command"


@pytest.fixture
def in_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The manifests mount the recipe's file into the pods of jobs."""
    assert job_pod.RECIPE == RECIPE
    recipe = tmp_path / "recipe.yaml"
    recipe.touch()
    monkeypatch.setattr(job_pod, "RECIPE", PurePosixPath(recipe))
    return recipe


def train(*words: str, out: Path) -> int:
    return cli.main(["train", "digits", *MODEL, "--out", str(out), "--name", "a", "--autoresume", *words])


def test_a_run_in_a_pod_names_no_commands_with_its_paths(in_pod, tmp_path, capsys):
    assert train("--stop-after", "1", out=tmp_path) == 75
    said = "".join(capsys.readouterr())
    assert f"the state is saved. Continue with: {AGAIN}\n" in said and "--resume" not in said
    assert train(out=tmp_path) == 0
    said = "".join(capsys.readouterr())
    assert f"{tmp_path / 'a'} contains" in said and not re.search("Next:|More:|worldsize eval|worldsize explain ", said)


def test_a_run_in_a_pod_that_lost_its_checkpoints_names_the_users_command(in_pod, tmp_path, capsys):
    assert train("--stop-after", "1", out=tmp_path) == 75
    (tmp_path / "a/checkpoints").rename(tmp_path / "gone")
    capsys.readouterr()
    assert train(out=tmp_path) == 66
    assert f"or start a new run: {AGAIN} with another --name" in capsys.readouterr().err


def test_elsewhere_they_are_named(tmp_path, capsys):
    assert train("--stop-after", "1", out=tmp_path) == 75
    assert f"Continue with: worldsize train --resume {tmp_path / 'a'}\n" in capsys.readouterr().err
    assert train(out=tmp_path) == 0
    assert f"Next: worldsize eval {tmp_path / 'a'}\n" in capsys.readouterr().out
