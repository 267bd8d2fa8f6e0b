"""The folder of a run is deleted or moved away, or another run takes its place, while the run trains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from interruptions import SETTINGS, same_run, start_until
from processes import worldsize
from worldsize.config.recipe import Track
from worldsize.errors import NotSaved
from worldsize.runs.run_folder import RunFolder, is_gone
from worldsize.runs.run_lock import RunLock
from worldsize.track import jsonl
from worldsize.track.base import Step

SAVES = ("--checkpoint.every-steps", "4")


@pytest.mark.parametrize("procs", [1, 2])
def test_a_run_whose_folder_is_moved_away_ends_and_continues_when_it_is_back(tmp_path: Path, procs: int):
    process = start_until(tmp_path, "a", procs, 6, *SAVES)
    run, moved = tmp_path / "runs" / "a", tmp_path / "elsewhere"
    run.rename(moved)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == NotSaved.exit_code, said
    assert "runs/a was deleted or moved away while its run trained" in said
    assert "worldsize train --resume runs/a" in said and "complete again" not in said and "Traceback" not in said
    assert list((tmp_path / "runs").iterdir()) == []
    moved.rename(run)
    assert worldsize("train", "--resume", "runs/a", "--procs", str(procs), cwd=tmp_path).returncode == 0
    whole = worldsize("train", "digits", *SETTINGS, *SAVES, "--procs", str(procs), "--name", "b", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    same_run(run, tmp_path / "runs" / "b")


def test_a_run_whose_folder_is_deleted_does_not_write_into_a_new_one(tmp_path: Path):
    process = start_until(tmp_path, "a", 2, 6, *SAVES)
    (tmp_path / "runs" / "a").rename(tmp_path / "deleted")  # the run still writes into it
    (tmp_path / "runs" / "a").mkdir()
    shutil.rmtree(tmp_path / "deleted", ignore_errors=True)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == NotSaved.exit_code and "was deleted or moved away" in said, said
    assert not list(tmp_path.glob("runs/a/checkpoints/step-*"))


def test_another_run_in_the_place_of_one_that_trains_is_noticed(tmp_path: Path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.recipe.touch()
    with RunLock() as lock, RunLock() as later:
        assert not is_gone(run, lock.taken_over)
        lock.acquire(run.lock)
        assert not is_gone(run, lock.taken_over)
        run.lock.unlink()  # as the message about a host that is gone advises
        assert not is_gone(run, lock.taken_over)
        later.acquire(run.lock)
        assert is_gone(run, lock.taken_over) and not is_gone(run, later.taken_over)
        run.path.rename(tmp_path / "moved")
        assert is_gone(run, later.taken_over)


def step(number: int) -> Step:
    return Step(number, 0.1, 1.0, 0.5, 0.1, 1.0, 10.0, [10.0], 1.0, 1.0, 1.0, 1.0, 1, 0)


def test_a_file_without_its_earlier_lines_is_not_complete_again(tmp_path: Path, caplog):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    tracker = jsonl.Tracker(Track(), folder, 0)
    tracker.steps([step(1)])
    folder.path.rename(tmp_path / "moved")
    tracker.steps([step(2)])
    (tmp_path / "moved").rename(folder.path)
    tracker.steps([step(3)])
    assert "complete again" in caplog.text and folder.metrics.read_text().count("\n") == 3
    caplog.clear()
    shutil.rmtree(folder.path)
    tracker.steps([step(4)])
    folder.path.mkdir()
    tracker.steps([step(5)])
    assert "complete again" not in caplog.text and "what was recorded before is lost" in caplog.text
