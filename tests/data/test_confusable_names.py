"""Names of files and classes as they are on real disks: not UTF-8, in another Unicode form, in a locale without UTF-8."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from processes import environment
from worldsize.data.confusable_names import look_alikes
from worldsize.distributed.rank import local_rank_info
from worldsize.launch import distribute, entry_point
from worldsize.runs.run_folder import RunFolder, RunLog

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
# Without these, Python uses UTF-8 in the locale C.
NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def tree(root: Path, split: str, *classes: str, names: tuple[bytes, ...] = (b"0.png", b"1.png")) -> Path:
    noise = np.random.default_rng(0)
    for one in classes:
        (root / split / one).mkdir(parents=True)
        for name in names:
            with open(os.fsencode(root / split / one) + b"/" + name, "wb") as file:
                Image.fromarray(noise.integers(0, 255, (40, 40, 3), np.uint8)).save(file, "PNG")
    return root


def test_a_name_that_is_not_utf_8_is_escaped_in_the_log(tmp_path, capsys, monkeypatch):
    # pytest-xdist cannot send a captured record with such a name.
    monkeypatch.setattr(logging.getLogger("worldsize"), "propagate", False)
    name = os.fsdecode(b"br\xffken.jpg")
    with RunLog(RunFolder(tmp_path), 0):
        logging.getLogger("worldsize.data").warning("broken image %s: %s", name, "é")
    assert "broken image br\\udcffken.jpg: é\n" in (tmp_path / "log.txt").read_text("utf-8")
    assert "Logging error" not in capsys.readouterr().err


def test_a_warning_about_such_a_name_is_printed_where_python_would_refuse(monkeypatch):
    strict = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict", write_through=True)
    monkeypatch.setattr(sys, "stderr", strict)
    record = logging.LogRecord(
        "worldsize", logging.WARNING, "", 0, "broken image %s", (os.fsdecode(b"br\xffken.jpg"),), None
    )
    distribute._ToStderr().emit(record)
    assert strict.buffer.getvalue() == b"warning: broken image br\\udcffken.jpg\n"


def test_several_commands_in_one_process_print_each_warning_once():
    logger = logging.getLogger("worldsize")
    for _ in range(3):
        distribute._log_to_terminal(local_rank_info(1))
    assert sum(isinstance(handler, distribute._ToStderr) for handler in logger.handlers) == 1


@pytest.mark.parametrize("start", [[str(Path(sys.executable).parent / "worldsize")], entry_point.command(sys.executable)])
def test_a_locale_without_utf_8_changes_nothing(tmp_path, start):
    """Names, recipes and output are UTF-8; a name that is not prints as it is or escaped."""
    root = tree(tmp_path / NFC, "train", "tea", NFC, names=(b"\xff.png", "ü.png".encode()))
    tree(root, "val", "tea", NFC)
    (tmp_path / "r.yaml").write_text(f"base: digits\ndata: {{name: folder, root: {NFC}}}\nsource: {NFC}\n", "utf-8")
    words = ["data", "info", NFC]
    clean = environment(**NO_UTF8)
    done = subprocess.run([*start, *words], cwd=tmp_path, env=clean, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"{NFC}\n2 classes".encode() in done.stdout
    rendered = subprocess.run(
        [*start, "render", "r.yaml", "--on", "local"], cwd=tmp_path, env=clean, capture_output=True, timeout=240
    )
    assert rendered.returncode == 0 and f"source: {NFC}".encode() in rendered.stdout, rendered.stderr


def test_a_name_that_is_not_utf_8_is_escaped_in_the_output(tmp_path):
    """Also where Python would refuse to print it, as in most locales."""
    root = tree(tmp_path / os.fsdecode(b"r\xff"), "train", "tea", "owl")
    tree(root, "val", "tea", "owl")
    command = [str(Path(sys.executable).parent / "worldsize"), "data", "info", root]
    strict = environment(PYTHONIOENCODING="utf-8:strict")
    done = subprocess.run(command, cwd=tmp_path, env=strict, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert b"/r\\udcff\n2 classes" in done.stdout


@pytest.mark.parametrize(
    ("name", "other", "text"),
    [
        (NFC, NFD, r". 'caf\xe9' and 'cafe\u0301' look alike, but their Unicode forms differ"),
        ("tea", "tea ", ". 'tea' and 'tea ' look alike, but one has blanks at an end"),
        (f"{NFC}/a.jpg", f"{NFD}/a.jpg", r". 'caf\xe9/a.jpg' and 'cafe\u0301/a.jpg' look alike"),
    ],
)
def test_names_that_look_alike_are_shown_with_their_difference(name, other, text):
    assert look_alikes(["x", name], ["y", other]).startswith(text)
    assert look_alikes([name, other], [other, name]) == look_alikes(["tea"], ["Tea", "te a"]) == ""


def test_messages_about_names_show_the_difference(tmp_path, fails):
    forms = tree(tree(tmp_path / "forms", "train", "tea", NFC), "val", "tea", NFD)
    assert r"'caf\xe9' and 'cafe\u0301' look alike" in fails(
        "train", "digits", "--data.name", "folder", "--data.root", forms
    )
    blanks = tree(tree(tmp_path / "blanks", "train", "tea", "owl"), "val", "tea", "owl ")
    assert "'owl' and 'owl ' look alike" in fails("train", "digits", "--data.name", "folder", "--data.root", blanks)
    (tmp_path / "list.txt").write_text(f"{NFD}/0.png\n", "utf-8")
    listed = ("--data.name", "folder", "--data.root", forms, "--data.val-list", tmp_path / "list.txt")
    assert "look alike, but their Unicode forms differ" in fails("train", "digits", *listed)
