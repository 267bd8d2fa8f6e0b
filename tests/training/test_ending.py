"""A run that was killed after its last checkpoint gets what it lacks when it resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from interruptions import start_until
from processes import worldsize
from three_steps import THREE_STEPS
from worldsize.errors import NotSaved
from worldsize.runs.history import last_event

TIMES = {"seconds", "images_per_s"}


def result(run: Path) -> dict:
    """What does not depend on times."""
    return {name: value for name, value in json.loads((run / "result.json").read_text()).items() if name not in TIMES}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    done = worldsize("train", "digits", *THREE_STEPS, "--name", "a", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "a"


@pytest.mark.parametrize("procs", [1, 2])
def test_a_run_that_was_killed_before_its_result_gets_it(run: Path, procs: int):
    whole, history = result(run), (run / "history.jsonl").read_text()
    (run / "result.json").unlink()
    (run / "history.jsonl").write_text("".join(history.splitlines(keepends=True)[:-1]))
    done = worldsize("train", "--resume", "runs/a", "--procs", str(procs), cwd=run.parents[1])
    assert done.returncode == 0 and "result.json was missing" in done.stderr, done.stderr
    assert result(run) == whole and last_event(run / "history.jsonl") == "finished"
    first, second = (json.loads(text.splitlines()[-1]) for text in (history, (run / "history.jsonl").read_text()))
    assert first | {"time": 0} == second | {"time": 0}
    report = worldsize("compare", "runs/a", "runs/a", cwd=run.parents[1])
    assert "has not finished" not in report.stdout, report.stdout


def test_a_run_that_was_killed_before_it_noted_its_end_notes_it_once(run: Path):
    history = (run / "history.jsonl").read_text()
    (run / "history.jsonl").write_text("".join(history.splitlines(keepends=True)[:-1]))
    for _ in range(2):
        done = worldsize("train", "--resume", "runs/a", cwd=run.parents[1])
        assert done.returncode == 0 and "was missing" not in done.stderr, done.stderr
        # Three steps of two epochs of two.
        assert "last step (it ends at --max-steps 3; --max-steps None trains all epochs); nothing to do" in done.stdout
    assert (run / "history.jsonl").read_text().count("finished") == 1


@pytest.mark.parametrize("procs", [1, 2])
def test_a_result_that_cannot_be_written_is_no_success(tmp_path: Path, procs: int):
    process = start_until(tmp_path, "a", procs, 2)
    run = tmp_path / "runs" / "a"
    (run / "result.json").mkdir()
    said, _ = process.communicate(timeout=240)
    assert process.returncode == NotSaved.exit_code, said
    assert "its last state is saved, but runs/a/result.json cannot be written: Is a directory" in said
    assert "complete the run: worldsize train --resume runs/a" in said and last_event(run / "history.jsonl") == "failed"
    (run / "result.json").rmdir()
    assert worldsize("train", "--resume", "runs/a", cwd=tmp_path).returncode == 0
    assert result(run)["steps"] == 27 and last_event(run / "history.jsonl") == "finished"


def test_a_run_that_ended_by_its_epochs_does_not_name_a_limit_beyond_them(tmp_path: Path):
    words = ("--max-steps", "100", "--epochs", "1")
    done = worldsize("train", "digits", *THREE_STEPS, *words, "--name", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = worldsize("train", "--resume", "runs/a", cwd=tmp_path)
    assert done.stdout == "runs/a has already reached its last step; nothing to do\n", done.stdout
