"""Each error of a call from Python is one of `worldsize.errors`, as docs/python.md says."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

import worldsize
from worldsize.errors import DataError, StoreUnreachable, UserError


@pytest.mark.parametrize("changes", [{3: 1}, {None: 1}, {"model": {3: 1}}, [("epochs", 1)], "epochs"])
def test_changes_that_are_no_settings_are_named(changes):
    with pytest.raises(UserError, match=r"3|None|pass settings by their names"):
        worldsize.load_recipe("digits", changes)


class Place:
    """A path of another library: only ``os.fspath`` reads it."""

    def __init__(self, value: str | bytes) -> None:
        self.value = value

    def __fspath__(self) -> str | bytes:
        return self.value


@pytest.mark.parametrize(
    "call",
    [
        lambda value: worldsize.load_recipe(value),
        lambda value: worldsize.train(value),
        lambda value: worldsize.train("digits", out=value),
        lambda value: worldsize.resume(value),
        lambda value: worldsize.load(value),
        lambda value: worldsize.Run(value),
    ],
)
def test_what_is_no_path_is_named(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    for value in (None, 3, {"epochs": 1}, b"runs/a", Place(b"runs/a")):
        with pytest.raises(UserError, match=r"(source|recipe|out|run|path) is .*: pass a path"):
            call(value)
    with pytest.raises(UserError, match=r"NUL character|is called"):
        call("a\0b")


def test_a_recipe_is_read_from_any_kind_of_path(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: digits\nepochs: 3\n")
    assert worldsize.load_recipe(Place(str(tmp_path / "mine.yaml"))).epochs == 3


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, UserError), (errno.EIO, StoreUnreachable)])
def test_a_recipe_that_cannot_be_written(tmp_path, monkeypatch, number, kind):
    monkeypatch.chdir(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(kind, match=rf"cannot write .*digits\.yaml: {os.strerror(number)}"):
        worldsize.train("digits")


def test_temporary_files_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    for call in (lambda: worldsize.train("digits"), lambda: worldsize.resume("a")):
        with pytest.raises(UserError, match=r"full/worldsize-.*: Not a directory"):
            call()


def test_a_current_folder_that_was_deleted(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match="the current folder does not exist any more"):
        worldsize.train("digits")
    monkeypatch.chdir(tmp_path)


def test_a_run_with_files_that_cannot_be_read(tmp_path):
    (tmp_path / "recipe.yaml").write_text("base: digits\n")
    (tmp_path / "result.json").write_text("{")
    (tmp_path / "metrics.jsonl").mkdir()
    run = worldsize.Run(tmp_path)
    with pytest.raises(DataError, match=r"result\.json is damaged"):
        assert run.result
    with pytest.raises(UserError, match=r"metrics\.jsonl: Is a directory"):
        assert run.steps


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: worldsize.load(""), "path is empty"),
        (lambda: worldsize.Run(""), "run is empty"),
        (lambda: worldsize.resume(""), "run is empty"),
        (lambda: worldsize.train(""), "recipe is empty"),
        (lambda: worldsize.train("digits", out=""), "out is empty"),
        (lambda: worldsize.load_recipe(""), "source is empty"),
        (lambda: worldsize.load_recipe("digits", {"data.root": ""}), "root: the path is empty"),
        (lambda: worldsize.load_recipe("digits", {"loss.teacher": ""}), "teacher: the path is empty"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(call, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=what):
        call()
