"""Audits of runs that an older version began, which did not have all of today's settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eight_steps import EIGHT_STEPS
from forging import rewrite_metrics, rewrite_state
from processes import identical, weights
from worldsize import checkpoint, cli
from worldsize.runs import step_hashes

SETTINGS = (*EIGHT_STEPS, "--epochs", "2", "--checkpoint.every-steps", "3")


@pytest.fixture(scope="module")
def stopped(ranks) -> Path:
    """A run that stopped after step 7 of 16; do not modify."""
    ranks(1).run("train", "digits", *SETTINGS, "--name", "stopped", "--stop-after", "7", code=75)
    return ranks.cwd / "runs" / "stopped"


def made_older(run: Path, section: str, setting: str) -> None:
    """Let the run be as it would have been without the setting: its identity, and the chain that begins with it."""
    found = checkpoint.list_checkpoints(run / "checkpoints")
    state = json.loads((found[0] / "state.json").read_text())
    state["identity"][section].pop(setting)
    head = step_hashes.run_hash(state)
    chains: dict[int, str] = {}

    def relinked(line: dict[str, Any]) -> dict[str, Any]:
        nonlocal head
        if line["kind"] == "step":
            head = chains[line["step"]] = step_hashes.link(head, line)
            line["chain"] = head
        return line

    rewrite_metrics(run, relinked)
    for path in found:
        rewrite_state(path, lambda old: old.update(identity=state["identity"], chain=chains[old["step"]]))


def test_a_run_of_an_older_version_is_consistent_also_after_it_has_continued(ranks, stopped, capsys):
    ranks(1).run("train", "digits", *SETTINGS, "--name", "whole")
    run = shutil.copytree(stopped, ranks.cwd / "runs" / "older")
    made_older(run, "schedule", "warmup_prefix")
    assert cli.main(["audit", str(run), "--windows", "0"]) == 0, capsys.readouterr().out
    ranks(1).run("train", "--resume", "runs/older")
    assert identical(weights(run), weights(ranks.cwd / "runs" / "whole"))
    assert cli.main(["audit", str(run), "--windows", "0"]) == 0, capsys.readouterr().out
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("warmup_prefix: true", "warmup_prefix: false"))
    assert cli.main(["audit", str(run), "--windows", "0"]) != 0
    assert "recipe.yaml is not the recipe" in capsys.readouterr().out
