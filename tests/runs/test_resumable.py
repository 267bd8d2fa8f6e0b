"""A request to continue continues a run, or it is refused: it never becomes a new run, and changes no file."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from processes import losses, newest
from three_steps import THREE_STEPS
from worldsize import cli
from worldsize.runs.resumable import newest as newest_of
from worldsize.runs.resumable import opened
from worldsize.runs.run_folder import RunFolder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the trained run, for tests that damage it."""
    return Path(shutil.copytree(trained, tmp_path / "some" / "a"))


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path):
    for step in (99_999_999, 100_000_000):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert newest_of(RunFolder(tmp_path)) == "step-100000000"


def content(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(fails, folder: Path, *words: str | Path, code: int = 64) -> str:
    """The message of a refused command that changed no file in the folder."""
    before = content(folder)
    message = fails("train", *words, code=code)
    assert content(folder) == before
    return message


def test_a_checkpoint_is_not_a_run(run, fails):
    for step in run.joinpath("checkpoints").iterdir():
        message = refused(fails, run, "--resume", step, "--max-steps", "4")
        assert "is a checkpoint" in message
        assert f"worldsize train --resume {run}." in message


def test_a_checkpoint_is_recognized_however_it_is_written(run, fails, monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(newest(run))
    assert f"--resume {run}" in refused(fails, run, "--resume", tmp_path / "link")
    monkeypatch.chdir(newest(run))
    assert cli.main(["train", "--resume", "."]) == 64
    alone = Path(shutil.copytree(newest(run), tmp_path / "copied"))
    message = refused(fails, alone, f"--resume={alone}")
    assert "is a checkpoint" in message and f"--model.weights {alone}/model.safetensors" in message


def test_a_part_of_a_run_is_not_a_run(run, fails):
    for part in ("checkpoints", "metrics.jsonl", "recipe.yaml"):
        assert f"worldsize train --resume {run}" in refused(fails, run, "--resume", run / part)


def test_a_folder_with_a_recipe_is_not_a_run(run, fails, tmp_path):
    for name, more in (("only", ()), ("export", ("model.onnx", "log.txt"))):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(run / "recipe.yaml", folder)
        for file in more:
            (folder / file).touch()
        message = refused(fails, folder, "--resume", folder)
        assert "is not a run folder" in message and f"worldsize train {folder}/recipe.yaml" in message


def test_a_run_that_lost_its_checkpoints_is_not_started_again(run, fails):
    shutil.rmtree(run / "checkpoints")
    message = refused(fails, run.parent, "--resume", run, code=66)
    assert "3 steps" in message and "Nothing was changed" in message
    (run / "checkpoints").mkdir()
    message = refused(fails, run.parent, "digits", *THREE_STEPS, "--out", run.parent, "--name", "a", "--autoresume", code=66)
    assert "Nothing was changed" in message
    (run / "history.jsonl").unlink()  # as of an older version
    refused(fails, run.parent, "--resume", run, code=66)
    (run / "result.json").unlink()
    refused(fails, run.parent, "--resume", run, "--procs", "2", code=66)


@pytest.mark.parametrize("words", [("eval",), ("predict",), ("export", "--to", "onnx"), ("labels",)])
def test_a_run_that_lost_its_checkpoints_is_not_called_new(run, fails, words):
    shutil.rmtree(run / "checkpoints")
    message = fails(words[0], run, *words[1:], code=66)
    assert f"{run} has recorded 3 steps, but {run}/checkpoints holds no checkpoint" in message


def test_autoresume_does_not_begin_a_run_among_other_files(fails, tmp_path):
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    message = refused(fails, tmp_path, "digits", *THREE_STEPS, "--out", tmp_path, "--name", "photos", "--autoresume")
    assert "is not a run folder: it has cats" in message


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(run, capfd, trained):
    lines = (run / "history.jsonl").read_text().splitlines(keepends=True)
    (run / "history.jsonl").write_text(lines[0])
    shutil.rmtree(run / "checkpoints")
    (run / "result.json").unlink()
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert "has no checkpoint yet: training starts again at step 0" in capfd.readouterr().err
    assert losses(run) == losses(trained)


def test_a_run_that_was_killed_while_it_started_can_start(trained, tmp_path):
    shutil.copy(trained / "recipe.yaml", tmp_path)
    (tmp_path / "log.txt").touch()
    assert opened(tmp_path).path == tmp_path
    (tmp_path / "history.jsonl").write_text(json.dumps({"event": "started", "step": 0}) + "\n")
    assert opened(tmp_path).path == tmp_path


def test_two_runs_are_not_one(run, fails):
    assert "--resume is given as" in refused(fails, run, "--resume", run, f"--resume={run.parent}")


def test_a_resumed_run_has_its_name_and_its_place(run, fails):
    for more in (("--name", "b"), ("--out", "elsewhere")):
        assert f"continues in {run}" in refused(fails, run, "--resume", run, *more)


@pytest.mark.parametrize("name", ["lock", "log.txt", "history.jsonl", "log.rank3.txt"])
def test_a_run_of_others_does_not_write_through_its_links(run, fails, tmp_path, name):
    (tmp_path / "precious").write_text("precious")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("../../precious")
    by_name = ("digits", *THREE_STEPS, "--out", run.parent, "--name", "a", "--autoresume")
    for words in (("--resume", run), by_name):
        message = refused(fails, tmp_path, *words)
        assert f"{run / name} is a link to ../../precious, where training would write" in message


def test_links_inside_of_a_run_and_to_its_checkpoints_on_another_disk_stay(run, tmp_path):
    (run / "checkpoints").rename(tmp_path / "checkpoints")
    (run / "checkpoints").symlink_to(tmp_path / "checkpoints")
    (run / "newest").symlink_to(f"checkpoints/{newest(run).name}")
    (run / "log").symlink_to("log.txt")
    assert opened(run).path == run
