"""Names of files and classes contain anything; a terminal gets only what it shows."""

from __future__ import annotations

import csv
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paths import SMALL_NETWORK
from worldsize import cli
from worldsize.config.tables import console, table
from worldsize.config.wording import printable, printable_lines

NAMES = ("a\x1b]0;title\x07", "b\nwarning: a line", "c\u202egnp", "d\x9b31m", "e\u3000f\u200dg", os.fsdecode(b"h\xff"))
CLASSES = ("cat\x1b[31m", "dog\u202egod")
JOINERS = "\u200c\u200d"


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A folder of images and one broken file for each class and split."""
    root, pixels = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for folder in (root / split / name for split in ("train", "val") for name in CLASSES):
        folder.mkdir(parents=True)
        for name in NAMES:
            Image.fromarray(pixels.integers(0, 255, (16, 16, 3), np.uint8)).save(folder / f"{name}.png")
        (folder / "broken\n\x1b[5m.png").write_text(f"no image of {folder}")
    return root


@pytest.fixture(scope="module")
def settings(images) -> tuple[str, ...]:
    return (
        *("digits", "--data.name", "folder", "--data.root", str(images), "--model.name", SMALL_NETWORK),
        *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--global-batch", "7", "--micro-batch", "7"),
        *("--max-steps", "2", "--schedule.warmup-epochs", "0"),
    )


@pytest.fixture
def output(capsys):
    """output(*words, code=0) runs a command and returns what it prints, which must be harmless."""

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert cli.main(list(words)) == code
        printed = capsys.readouterr()
        shown = printed.out + printed.err
        assert [one for one in shown if not one.isprintable() and one not in "\n\r\t\u3000" + JOINERS] == []
        return shown

    return run


def test_no_command_prints_what_a_terminal_obeys(images, settings, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")  # a table folds no name
    data, out = str(images), ("--out", str(tmp_path), "--name")
    verified = output("data", "verify", "--root", data, "--max-broken", "1")
    assert r"cat\x1b[31m/broken\n\x1b[5m.png" in verified
    assert r"broken\n\x1b[5m.png" in output("data", "pack", "--root", data, "--out", "packed", "--max-broken", "1")
    assert r"broken\n\x1b[5m.png" in output("init", data, "--out", "recipe.yaml", "--weights", "none")
    assert r"broken\n\x1b[5m.png" in output("train", *settings, *out, "a", "--data.max-broken", "0", code=65)
    assert r"broken\n\x1b[5m.png" in output("train", *settings, *out, "b", "--data.max-broken", "0.5")
    log = (tmp_path / "b" / "log.txt").read_text()
    assert r"cat\x1b[31m/broken\n\x1b[5m.png" in log and "\x1b" not in log
    predicted = output("predict", "b", data)
    for name in (*NAMES, "broken\n\x1b[5m"):
        assert f"{printable(name)}.png" in predicted
    assert r"dog\u202egod" in predicted
    assert r"b\nwarning: a line.png" in output("labels", "b", "--out", "labels.csv")
    assert r"none\x1b[31m" in output("train", *settings, "--data.root", f"{data}/none\x1b[31m", code=64)


def test_files_for_programs_have_the_names_themselves(images, settings, output, tmp_path):
    output("train", *settings, "--out", str(tmp_path), "--name", "a", "--data.max-broken", "0.5")
    output("predict", str(tmp_path / "a"), str(images), "--format", "csv", "--results-file", str(tmp_path / "p.csv"))
    with open(tmp_path / "p.csv", newline="", encoding="utf-8", errors="surrogateescape") as file:
        names = {Path(row["filename"]).name for row in csv.DictReader(file)}
    assert names == {f"{name}.png" for name in (*NAMES, "broken\n\x1b[5m")}


@given(st.text())
def test_only_what_no_terminal_shows_is_escaped(text: str):
    assert all(one.isprintable() or one in JOINERS or unicodedata.category(one) == "Zs" for one in printable(text))
    assert printable_lines(text).count("\n") == text.count("\n")
    if text.isprintable():
        assert printable(text) == text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Grüße 图片 🐈.png", "Grüße 图片 🐈.png"),
        ("\u3042\u3000\u3044", "\u3042\u3000\u3044"),  # the blank of Japanese
        ("\U0001f469\u200d\U0001f4bb", "\U0001f469\u200d\U0001f4bb"),  # an emoji of two, which a joiner joins
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nb\tc\\n", r"a\nb\tc" + r"\n"),
        ("\udcff\u2066", r"\udcff\u2066"),
    ],
)
def test_escapes(name: str, expected: str):
    assert printable(name) == expected


def test_the_columns_of_a_table_are_as_wide_as_the_escapes(tmp_path):
    grid = table("name", "value")
    grid.add_row("a\x1b[31mb", "1")
    grid.add_row("plain", "2")
    with open(tmp_path / "out.txt", "w+") as file:
        console(file).print(grid)
        console(file).print("of no table: \x9bJ")
        file.seek(0)
        *lines, last = file.read().splitlines()
    assert last == r"of no table: \x9bJ"
    assert [line.rstrip() for line in lines] == ["name        value", r"a\x1b[31mb  1", "plain       2"]
