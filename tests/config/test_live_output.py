"""Bars and lines that are drawn again and again go to terminals only, whatever FORCE_COLOR says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from rich.console import Console

import worldsize
from paths import ROOT, SMALL_NETWORK
from worldsize.bench.scaling import command as scaling
from worldsize.cluster.storage import files
from worldsize.config import live_output
from worldsize.inference import progress
from worldsize.reproduce import training_process

SOURCE = ROOT / "src" / "worldsize"
DRAWN_OVER = re.compile(r"\r|\x1b\[(?!\d*(;\d+)*m)")  # all but colors


@pytest.fixture(params=["FORCE_COLOR", "TTY_COMPATIBLE"])
def forced(request, monkeypatch):
    """A variable that makes rich take a pipe for a terminal."""
    monkeypatch.setenv(request.param, "1")


def test_a_terminal_is_one_and_a_file_is_none_even_with_colors(forced, tmp_path):
    near, far = os.openpty()
    with open(far, "w") as terminal, open(tmp_path / "log", "w") as log:
        assert live_output.possible(Console(file=terminal))
        assert Console(file=log).is_terminal and not live_output.possible(Console(file=log))
    os.close(near)


def test_a_terminal_that_cannot_be_drawn_over_is_none(monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    near, far = os.openpty()
    with open(far, "w") as terminal:
        assert not live_output.possible(Console(file=terminal))
    os.close(near)


def _training_process() -> None:
    assert training_process.run(["recipes"], Path("metrics.jsonl"), 1)[0] == 0


def _images() -> None:
    with progress.images(2, 2, shown=True) as advance:
        advance(1)


def _files() -> None:
    with files._progress_bar("a file", 2) as advance:
        advance(1)


def _scaling() -> None:
    with scaling.progress_bar() as bar:
        bar.add_task("a run", total=2)


def _training() -> None:
    sizes = {"data.train_crop_size": 16, "data.val_crop_size": 16, "data.val_resize_size": 16}
    quick = {"model.name": SMALL_NETWORK, "global_batch": 144, "micro_batch": 36, "max_steps": 2, **sizes}
    worldsize.train(worldsize.load_recipe("digits", quick))


@pytest.mark.parametrize("show", [_training_process, _images, _files, _scaling, _training])
def test_nothing_is_drawn_over_in_a_log_or_a_notebook(forced, tmp_path, monkeypatch, capfd, show):
    monkeypatch.chdir(tmp_path)
    show()
    out, err = capfd.readouterr()
    assert DRAWN_OVER.findall(out + err) == []
    assert "run-1" in out or show is not _training


def test_all_that_is_live_asks_in_one_way():
    asking = {path.name for path in SOURCE.rglob("*.py") if "is_terminal" in path.read_text()}
    assert asking == {"live_output.py"}
