"""`worldsize data info`: what it counts, and the contact sheet."""

from __future__ import annotations

import base64
import io
import re
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from packing import BROKEN, encode, files, noise, packed
from surveyed import data
from trees import put, tree
from worldsize.data import shards
from worldsize.data.shards.images import How
from worldsize.data.shards.pack import pack
from worldsize.data.survey import info, sheet

# Info --------------------------------------------------------------------------------------------------------------


def test_info_prints_the_same_for_originals_and_shards(root, tmp_path, capsys):
    packed(root, tmp_path / "out")
    capsys.readouterr()
    outputs = []
    for path in (root, tmp_path / "out"):
        assert data("info", path) == 0
        outputs.append(capsys.readouterr().out.splitlines())
    originals, of_shards = (
        [line for line in lines if "▏" in line or "█" in line or "per class" in line] for lines in outputs
    )
    # Only the class counts: without an index, the bomb's header counts as readable.
    assert of_shards[:2] == originals[:2]
    assert "original bytes" in "\n".join(outputs[1])
    assert "shards" in "\n".join(outputs[1])


def test_a_format_that_does_not_train_is_broken_to_info_too(tmp_path, capsys):
    root = tree(tmp_path / "root", "train/a/1.png", "train/b/2.png", "val/a/3.png", "val/b/4.png")
    put(root / "train" / "a" / "5.png", encode(noise(40, 40), "PCX"))
    assert data("info", root) == 0
    assert "PNG color 2, broken 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "expected"),
    [({"raw": 24}, "shorter side 24"), ({"reencode": 70, "max_side": 30}, "quality 70, longer side at most 30")],
)
def test_info_says_how_shards_were_made(root, tmp_path, capsys, how, expected):
    packed(root, tmp_path / "out", **how)
    assert data("info", tmp_path / "out") == 0
    assert expected in capsys.readouterr().out


def test_info_says_in_order_how_shards_of_shards_were_made(root, tmp_path, capsys):
    first = packed(root, tmp_path / "1", reencode=70, max_side=30)
    pack(first, tmp_path / "2", How(raw=24), 20_000, 2, 1.0)
    pack(shards.open_dataset(tmp_path / "2"), tmp_path / "3", How(reencode=90), 20_000, 2, 1.0)
    assert data("info", tmp_path / "3") == 0
    steps = r"quality 70, longer side at most 30 .*; then pixels, shorter side 24.*; then JPEGs of quality 90 \("
    assert re.search(steps, capsys.readouterr().out)


def test_bars_count_every_value():
    lines = list(info.bars(np.array([40, 50, 60, 300, 5000])))
    assert [line.split()[-1] for line in lines if "█" in line] == ["3", "1", "1"]
    assert lines[0].split()[:3] == ["32", "to", "63"]
    assert lines[-1].split()[:3] == ["4,096", "and", "more"]
    assert lines[0].count("█") == 3 * lines[-1].count("█") + 1 or lines[0].count("█") == 40


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 40), st.integers(0, 5))
def test_a_sheet_is_balanced_over_classes(labels, count, seed):
    chosen = sheet.choose(np.array(labels, np.int32), 7, count, seed)
    assert len(set(chosen)) == len(chosen) == min(count, len(labels))
    taken = np.bincount([labels[i] for i in chosen], minlength=7)
    available = np.bincount(labels, minlength=7)
    most = taken.max()
    assert all(t >= most - 1 or t == n for t, n in zip(taken, available, strict=True))


def test_the_seed_decides_which_images_are_chosen():
    labels = np.repeat(np.arange(10, dtype=np.int32), 50)
    assert sheet.choose(labels, 10, 20, 1) == sheet.choose(labels, 10, 20, 1) != sheet.choose(labels, 10, 20, 2)


def test_an_html_sheet_is_self_contained(root, tmp_path):
    shutil.copytree(root, tmp_path / "root")
    for split in ("train", "val"):
        put(tmp_path / "root" / split / "<b>&bold" / "1.png", encode(noise(50, 50, 1), "PNG"))
    page = tmp_path / "sheet.html"
    assert data("info", tmp_path / "root", "--sheet", page, "--images", "100") == 0
    text = page.read_text()
    assert "&lt;b&gt;&amp;bold" in text
    assert "<b>&bold" not in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    images = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', text)
    assert len(images) == 29
    assert text.count(": broken") == 2 * len(BROKEN)
    assert Image.open(io.BytesIO(base64.b64decode(images[0]))).size == (128, 128)


def test_a_png_sheet_shows_the_images(tmp_path):
    root = tree(tmp_path / "root", "train/a/1.png", "train/b/2.png", "val/a/3.png", "val/b/4.png")
    assert data("info", root, "--sheet", tmp_path / "sheet.PNG") == 0
    image = Image.open(tmp_path / "sheet.PNG")
    assert image.size == (8 + 2 * 136, 8 + 154)
    assert image.getpixel((70, 70)) == (255, 0, 0)
    assert image.getpixel((70 + 136, 70)) == (0, 255, 0)
    assert np.asarray(image)[137:156, 8:136].min() < 100, "the class name is missing"


def test_a_png_sheet_shows_class_names_of_any_characters(tmp_path):
    names = ("two\nlines", "\udcff")
    root = tree(tmp_path / "root", *(f"{split}/{name}/{split}.png" for split in ("train", "val") for name in names))
    assert data("info", root, "--sheet", tmp_path / "sheet.png") == 0
    assert Image.open(tmp_path / "sheet.png").size == (8 + 2 * 136, 8 + 154)


def test_another_kind_of_sheet_is_refused(fails, root):
    assert "must end in .png or .html" in fails("data", "info", root, "--sheet", "sheet.pdf")
    assert "must be at least 1" in fails("data", "info", root, "--images", "0")


def test_a_sheet_that_cannot_be_written_is_refused_before_the_work(fails, root, tmp_path, monkeypatch):
    monkeypatch.setattr(info, "describe", lambda *_: pytest.fail("the dataset was read"))
    assert "--sheet gone/x.png: no such folder" in fails("data", "info", root, "--sheet", "gone/x.png")
    (tmp_path / "x.png").mkdir()
    assert "--sheet x.png is a folder" in fails("data", "info", root, "--sheet", "x.png")


def test_nothing_is_written_into_the_dataset(root, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    out = tmp_path / "out"
    packed(root, out)
    of_shards = files(out)
    data("verify", "--root", root), data("info", root), data("verify", "--root", out), data("info", out)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert files(out) == of_shards
