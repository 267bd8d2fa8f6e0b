"""A run that was resumed with another number of processes is computed again with those of each step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eight_steps import EIGHT_STEPS
from processes import worldsize
from worldsize.config.recipe import Recipe
from worldsize.reproduce import scratch_runs
from worldsize.runs import world_sizes
from worldsize.runs.run_folder import RunFolder

# Eight steps of digits per epoch; checkpoints after steps 8 and 16.
SETTINGS = (*EIGHT_STEPS, "--epochs", "2", "--checkpoint.every-epochs", "1", "--checkpoint.keep", "2")


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([], [7, 7, 7, 7]),
        ([(0, 1)], [1, 1, 1, 1]),
        ([(0, 1), (2, 2)], [1, 1, 2, 2]),
        ([(2, 2)], [7, 7, 2, 2]),  # an older version has begun it
        ([(0, 1), (3, 2), (1, 4)], [1, 4, 4, 4]),  # resumed from an earlier checkpoint
    ],
)
def test_a_step_has_the_world_size_of_the_last_session_that_computed_it(tmp_path, starts, expected):
    lines = [json.dumps({"event": "started", "step": step, "world_size": size}) for step, size in starts]
    others = [json.dumps({"event": "saved", "step": 1}), '{"event": "started", "st']
    run = RunFolder(tmp_path)
    if starts:
        run.history.write_text("\n".join([*lines, *others]))
    assert world_sizes.of_steps(run, 1, 4, otherwise=7) == expected
    assert world_sizes.of_steps(run, 3, 4, otherwise=7) == expected[2:]


@pytest.fixture(scope="module")
def mixed(ranks) -> Path:
    """Steps 1 to 3 on one process, 4 to 16 on two; do not modify."""
    ranks(1).run("train", "digits", *SETTINGS, "--name", "mixed", "--stop-after", "3", code=75)
    ranks(2).run("train", "--resume", "runs/mixed")
    return ranks.cwd / "runs" / "mixed"


def test_an_audit_compares_steps_of_several_world_sizes_up_to_rounding(mixed, tmp_path):
    lines = [json.loads(line) for line in RunFolder(mixed).history.read_text().splitlines()]
    assert [line["world_size"] for line in lines if line["event"] == "started"] == [1, 2]
    done = worldsize("audit", mixed, "--seed", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"window +steps 1 to 8: the same samples, the same numbers up to rounding", done.stdout)
    assert "window       steps 9 to 16: bit-identical, 2 processes" in done.stdout
    assert "because 2 processes computed what 1 did, with strategy ddp" in done.stdout


def test_a_replay_uses_the_processes_that_computed_the_step(mixed, tmp_path):
    done = worldsize("replay", mixed, "--step", "2", "--from-start", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "computing steps 1 to 2 again, with 1 process" in done.stdout
    assert "step 2: bit-identical to metrics.jsonl" in done.stdout


@pytest.mark.parametrize(
    ("strategy", "procs", "expected"),
    [("single", 1, "single"), ("single", 2, "auto"), ("ddp", 1, "auto"), ("ddp", 2, "ddp"), ("bitwise", 2, "bitwise")],
)
def test_steps_of_other_processes_need_another_strategy(strategy, procs, expected):
    recipe = Recipe.model_validate({"parallel": {"strategy": strategy}})
    assert scratch_runs.at_size(recipe, procs).parallel.strategy == expected


def test_a_run_resumed_as_single_replays_its_steps_of_several_processes(ranks, tmp_path):
    ranks(2).run("train", "digits", *SETTINGS, "--name", "alone", "--stop-after", "3", "--parallel.strategy", "ddp", code=75)
    ranks(1).run("train", "--resume", "runs/alone", "--parallel.strategy", "single", "--stop-after", "4", code=75)
    done = worldsize("replay", ranks.cwd / "runs" / "alone", "--step", "2", "--from-start", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2: bit-identical to metrics.jsonl" in done.stdout
