"""`worldsize data verify`: what it prints, refuses and exits with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from packing import encode, noise
from surveyed import data
from trees import put, tree, two_classes
from worldsize.data import shards
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.data.shards.images import How, examine
from worldsize.data.shards.pack import pack
from worldsize.data.survey import verify_report
from worldsize.data.survey.verify import verify

# The command -------------------------------------------------------------------------------------------------------


def test_verify_exits_with_65_above_max_broken_after_printing_everything(root, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert data("verify", "--root", root, "--report", report) == 65
    out, err = capsys.readouterr()
    assert "4 of 28 training images are broken" in err
    assert "broken (4):" in out
    assert "in both train and val" in out
    assert f"{root}/train/__odd.ones__/empty.jpg: empty file" in out
    assert json.loads(report.read_text())["splits"]["train"]["images"] == 28
    assert data("verify", "--root", root, "--max-broken", "0.2") == 0


def test_a_dataset_without_problems_has_no_findings(tmp_path, capsys):
    for i in range(8):
        split, label = ("train", "val")[i // 4], "ab"[i % 2]
        put(tmp_path / "root" / split / label / f"{i}.jpg", encode(noise(40, 40, i), "JPEG"))
    assert data("verify", "--root", tmp_path / "root") == 0
    out = capsys.readouterr().out
    assert "no broken images, no duplicates" in out
    assert "odd" not in out


def test_only_the_first_of_many_are_listed(tmp_path, capsys):
    for split in ("train", "val"):
        for label in "ab":
            for i in range(15):
                put(tmp_path / "root" / split / label / f"{i}.jpg", f"{split}{label}{i}".encode())
    assert data("verify", "--root", tmp_path / "root") == 65
    out = capsys.readouterr().out
    assert "broken (60):" in out
    assert "and 40 more" in out
    assert len(out.splitlines()) < 40


def test_the_dataset_is_the_first_word_or_root(fails, root, capfd):
    for words in ((root,), ("--root", root), (f"--root={root}",), ("--workers", "1", "--root", root)):
        assert data("verify", *words, "--max-broken", "1") == 0
    lines = capfd.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("train content")]) == 4
    assert "an argument is empty; is the shell variable set?" in fails("data", "verify", "")
    assert "--root is empty; is the shell variable set?" in fails("data", "verify", "--root", "")
    assert "--root is given as" in fails("data", "verify", "--root", "other", "--root", root)


def test_a_report_that_cannot_be_written_is_refused_before_the_work(fails, root):
    assert "no such folder" in fails("data", "verify", "--root", root, "--report", "gone/report.json")
    assert f"--report {root} is a folder" in fails("data", "verify", "--root", root, "--report", root)


@pytest.mark.parametrize("command", [("verify",), ("pack", "--out", "shards")])
@pytest.mark.parametrize("share", ["-1", "1.5", "nan"])
def test_a_share_of_broken_images_is_from_0_to_1(fails, root, command, share):
    said = fails("data", *command, "--root", root, "--max-broken", share)
    assert f"--max-broken {share}: must be a share of the images, 0 to 1" in said


def test_a_report_on_a_full_disk_is_explained(fails, root):
    assert "cannot write /dev/full: No space left on device" in fails(
        "data", "verify", "--root", root, "--report", "/dev/full"
    )


def test_names_cannot_contain_terminal_escapes(tmp_path, capsys):
    for split in ("train", "val"):
        for label in "ab":
            put(tmp_path / "root" / split / label / "x\x1b[31mred.jpg", b"")
    data("verify", "--root", tmp_path / "root")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"x\x1b[31mred.jpg" in out


def test_names_that_are_not_utf8_are_printed(tmp_path, capsys):
    root = tree(tmp_path / "root", "train/a/1.png", "train/b/2.png", "val/a/3.png", "val/b/4.png")
    try:
        Path(os.fsdecode(os.fsencode(root / "train" / "a") + b"/\xff.jpg")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system only supports UTF-8 names")
    report, page = tmp_path / "report.json", tmp_path / "sheet.html"
    assert data("verify", "--root", root, "--report", report) == 65
    assert r"\udcff.jpg: empty file" in capsys.readouterr().out
    assert json.loads(report.read_text())["splits"]["train"]["broken"][0]["image"].endswith("\udcff.jpg")
    assert data("info", root, "--sheet", page) == 0


def test_images_in_memory_are_compared_too():
    pixels = np.zeros((4, 8, 8, 3), np.uint8)
    pixels[1:3] = 9
    samples = ArraySamples("four", pixels, np.arange(4, dtype=np.int32) % 2, ("a", "b"))
    other = ArraySamples("one", pixels[:1] + 1, np.zeros(1, np.int32), ("a", "b"))
    dataset = Dataset(samples, other)
    page = verify_report.report(dataset, verify(dataset, 2))
    assert page["duplicates"] == [["four #0", "four #3"], ["four #1", "four #2"]]


def test_the_content_of_images_in_memory_is_that_of_their_shards(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    samples = ArraySamples("six", pixels, np.arange(6, dtype=np.int32) % 2, ("a", "b"))
    dataset = Dataset(samples, samples)
    pack(dataset, tmp_path / "out", How(), 20_000, 2, 0)
    one, other = verify(dataset, 2)["val"], verify(shards.open_dataset(tmp_path / "out"), 2)["val"]
    assert (one.content, one.bytes) == (other.content, other.bytes)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_images_that_exif_turns_are_odd(kind, orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    assert examine(encode(noise(40, 40), kind, exif=exif)).turned == (2 <= orientation <= 8)


def test_images_that_exif_turns_are_counted_with_the_remedy(tmp_path, capsys):
    root, exif = two_classes(tmp_path / "root"), Image.Exif()
    assert data("verify", "--root", root) == 0
    assert "EXIF" not in capsys.readouterr().out
    exif[ExifTags.Base.Orientation] = 6
    put(root / "train" / "cat" / "turned.jpg", encode(noise(40, 50), "JPEG", exif=exif))
    put(root / "train" / "cat" / "damaged.jpg", encode(noise(41, 50), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"))
    put(root / "train" / "cat" / "turned.tiff", encode(noise(42, 50), "TIFF", exif=exif))  # Pillow turns it
    assert data("verify", "--root", root) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("odd: rotated or mirrored by EXIF, which is ignored (1):")
    assert lines[at + 1].endswith("turned.jpg") and "mogrify -auto-orient" in lines[at + 2]
