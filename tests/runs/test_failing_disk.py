"""A disk that does not answer is no damage and no error of the user: nothing is lost, and the run may start again (69)."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from three_steps import THREE_STEPS
from worldsize import checkpoint, cli
from worldsize.errors import StoreUnreachable


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "a"))


def fail_to_read(path: Path) -> None:
    """From now on, reading this file is an error of the system: EIO, as of a failing disk."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def go_stale(monkeypatch, name: str) -> None:
    """From now on, files and folders whose path ends with ``name`` are ESTALE, as on NFS after a change of the server."""

    def refusing(call):
        def changed(path, *arguments, **options):
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).endswith(name):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
            return call(path, *arguments, **options)

        return changed

    monkeypatch.setattr(os, "stat", refusing(os.stat))
    monkeypatch.setattr(Path, "stat", refusing(Path.stat))  # with Python 3.10, it does not look up os.stat
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))


def test_a_checkpoint_that_cannot_be_read_is_not_damaged(run):
    newest = run / "checkpoints" / "step-00000003"
    fail_to_read(newest / "manifest.json")
    with pytest.raises(StoreUnreachable, match=r"3 cannot be read: Input/output error.* an older checkpoint"):
        checkpoint.newest_valid(run / "checkpoints")
    shutil.rmtree(newest)  # the remedy
    assert checkpoint.newest_valid(run / "checkpoints") == run / "checkpoints" / "step-00000002"


@pytest.mark.parametrize("name", ["step-00000003/model.safetensors", "checkpoints"])
def test_what_is_stale_is_not_missing(run, fails, monkeypatch, name):
    go_stale(monkeypatch, name)
    message = fails("eval", run, code=69)
    assert "Stale file handle" in message and name in message


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl", "recipe.yaml"])
def test_a_run_does_not_continue_without_its_record(run, fails, monkeypatch, name):
    read = Path.read_text

    def failing(path, *arguments, **options):  # a run with a link to another file would be refused
        if path == run / name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", failing)
    message = fails("train", "--resume", run, "--max-steps", "4", code=69)
    assert f"{run / name}: Input/output error" in message
    assert [path.name for path in checkpoint.list_checkpoints(run / "checkpoints")] == ["step-00000003", "step-00000002"]


def test_a_run_on_a_disk_that_does_not_answer_is_not_begun_again(run, fails, monkeypatch):
    go_stale(monkeypatch, str(run))
    words = ["train", run / "recipe.yaml", "--autoresume", "--name", "a", "--out", run.parent]
    assert f"{run}: Stale file handle" in fails(*words, code=69)


def test_two_processes_end_together_if_one_cannot_read(ranks):
    ranks(2).run("train", "digits", *THREE_STEPS, "--name", "a")
    output = ranks(2, sabotage="unreadable_on_rank_1").run("train", "--resume", "runs/a", "--max-steps", "4", code=69)
    assert "model.safetensors cannot be read: Input/output error" in output and "(on rank 1)" in output


@pytest.mark.parametrize("command", [["compare", "b"], ["report", "--out", "page.html"]])
def test_no_result_is_drawn_from_a_record_that_cannot_be_read(run, fails, command):
    shutil.copytree(run, run.parent / "b")
    fail_to_read(run / "metrics.jsonl")
    word, *more = command
    assert f"{run}/metrics.jsonl: Input/output error" in fails(word, run, *more, code=69)
    assert not Path("page.html").exists()


@pytest.mark.parametrize("name", ["timing.jsonl", "environment.json", "recipe.yaml"])
def test_explain_names_the_file(run, fails, name):
    fail_to_read(run / name)
    assert "Input/output error" in fails("explain", run, code=69)


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_the_list_of_runs_shows_which_one_cannot_be_read(run, capfd, name):
    shutil.copytree(run, run.parent / "b")
    fail_to_read(run / name)
    assert cli.main(["runs", str(run.parent)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("b") and "finished" in line for line in lines)
    assert any(line.startswith("a") and "cannot be read: Input/output error" in line for line in lines)
