"""`worldsize data verify` and `info`, for images of every kind."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from packing import BROKEN, SPECIAL, colour_png, encode, files, noise, odd_folder, packed, special_files
from trees import opened, put, tree, two_classes
from worldsize import cli
from worldsize.data import shards
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.data.shards.images import How, examine
from worldsize.data.shards.pack import pack
from worldsize.data.survey import info, sheet, verify_report
from worldsize.data.survey.verify import verify


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """`odd_folder`, plus a duplicate, an image in both splits, and an image with two labels."""
    root = odd_folder(tmp_path_factory.mktemp("originals") / "root")
    train = root / "train"
    put(train / "plain" / "again.jpg", (train / "plain" / "1.jpg").read_bytes())
    put(train / "plain" / "sample.webp", (train / "__odd.ones__" / "alpha.webp").read_bytes())
    put(root / "val" / "plain" / "leak.jpg", (train / "plain" / "3.jpg").read_bytes())
    put(train / "plain" / "large.png", encode(Image.new("1", (6000, 5000)), "PNG"))
    return root


@pytest.fixture(scope="module")
def page(root, tmp_path_factory) -> dict:
    dataset = opened(root, cache=tmp_path_factory.mktemp("cache"))
    return verify_report.report(dataset, verify(dataset, 2))


def short(names) -> set[str]:
    return {name.rsplit("/", 1)[-1] for name in names}


def data(*arguments: str | Path) -> int:
    return cli.main(["data", *map(str, arguments)])


def test_broken_images_are_listed_with_their_reasons(page):
    reasons = {entry["image"].rsplit("/", 1)[-1]: entry["reason"] for entry in page["splits"]["train"]["broken"]}
    assert set(reasons) == set(BROKEN)
    assert "truncated" in reasons["truncated.jpg"]
    assert reasons["empty.jpg"] == "empty file"
    assert "DecompressionBomb" in reasons["bomb.jpg"]
    assert page["splits"]["val"]["broken"] == []


def test_what_is_not_a_regular_file_is_broken(tmp_path, capsys):
    root, report = two_classes(tmp_path / "root"), tmp_path / "report.json"
    with special_files(root / "train" / "cat"):
        assert data("verify", "--root", root, "--report", report) == 65
        assert data("info", root) == 0
    assert "broken 5, PNG color 3" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert {Path(one["image"]).name: one["reason"] for one in found["splits"]["train"]["broken"]} == SPECIAL
    assert found["duplicates"] == []


def test_shards_of_what_is_not_a_regular_file_have_the_same_content(tmp_path):
    root = two_classes(tmp_path / "root")
    with special_files(root / "train" / "cat"):
        originals = verify(opened(root), 1)["train"]
        shards = verify(packed(root, tmp_path / "out"), 1)["train"]
    assert shards.content == originals.content
    assert list(shards.broken) == list(originals.broken)


def test_odd_images_are_listed_by_what_is_odd(page):
    odd = {kind: short(names) for kind, names in page["splits"]["train"]["odd"].items()}
    assert odd.pop("tiny (a side below 32 pixels)") >= {"one pixel.JPEG", "bitmap.bmp", "alpha.webp"}
    assert odd == {
        "CMYK": {"cmyk.JPEG"},
        "PNG named .jpeg": {"a png.JPEG"},
        "more than 8 bits a channel": {"sixteen bit.png"},
        "transparent, which is ignored": {"alpha.webp", "sample.webp"},
        "very large (above 25 million pixels)": {"large.png"},
    }


def bmp_16_bit(width: int, height: int) -> bytes:
    """16 bits per pixel: 5, 6 and 5 for red, green and blue, so less than 8 per channel."""
    header = struct.pack("<IiiHHIIiiII", 40, width, -height, 1, 16, 3, 2 * width * height, 0, 0, 0, 0)
    header += struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    return (
        struct.pack("<2sIHHI", b"BM", 14 + len(header) + 2 * width * height, 0, 0, 14 + len(header))
        + header
        + bytes(2 * width * height)
    )


def test_information_that_color_images_lose_is_odd(tmp_path):
    root = tree(tmp_path / "root", "train/a/1.png", "train/b/2.png", "val/a/3.png", "val/b/4.png")
    put(root / "train" / "a" / "deep.png", colour_png(40, 40, bytes(40 * (1 + 40 * 6)), bits=16))
    put(root / "train" / "a" / "deep.ppm", b"P6 40 40 65535\n" + bytes(40 * 40 * 6))
    put(root / "train" / "a" / "16 bits a pixel.bmp", bmp_16_bit(40, 40))
    put(root / "train" / "a" / "one color.png", encode(noise(40, 40), "PNG", transparency=(0, 0, 0)))
    put(root / "train" / "a" / "one entry.gif", encode(Image.new("P", (40, 40)), "GIF", transparency=0))
    dataset = opened(root)
    odd = {
        kind: short(names)
        for kind, names in verify_report.report(dataset, verify(dataset, 1))["splits"]["train"]["odd"].items()
    }
    assert odd["more than 8 bits a channel"] == {"deep.png", "deep.ppm"}
    assert odd["transparent, which is ignored"] == {"one color.png", "one entry.gif"}


def test_the_same_bytes_are_found_within_and_across_splits_and_classes(page):
    groups = [short(group) for group in page["duplicates"]]
    assert {"1.jpg", "again.jpg"} in groups
    assert {"3.jpg", "leak.jpg"} in groups
    assert {"alpha.webp", "sample.webp"} in groups
    leaks = [sorted(group) for group in page["in_train_and_val"]]
    assert [short(group) for group in leaks] == [{"3.jpg", "leak.jpg"}]
    assert ["/train/" in leaks[0][0], "/val/" in leaks[0][1]] == [True, True]
    # Both images of val are the same.
    assert [short(group) for group in page["with_different_labels"]] == [{"alpha.webp", "sample.webp"}, {"1.png"}]


def test_classes_are_counted(page, root):
    for split in ("train", "val"):
        expected = {folder.name: len(list(folder.iterdir())) for folder in (root / split).iterdir()}
        assert page["splits"][split]["classes"] == expected
        assert page["splits"][split]["images"] == sum(expected.values())
        assert page["splits"][split]["bytes"] == sum(f.stat().st_size for f in (root / split).rglob("*") if f.is_file())


def test_shards_are_found_to_hold_the_same(root, page, tmp_path):
    dataset = packed(root, tmp_path / "out")
    of_shards = verify_report.report(dataset, verify(dataset, 2))
    for split in ("train", "val"):
        one, other = page["splits"][split], of_shards["splits"][split]
        for key in ("images", "bytes", "classes", "fingerprint", "content"):
            assert one[key] == other[key]
        assert {kind: short(names) for kind, names in one["odd"].items()} == {k: short(n) for k, n in other["odd"].items()}
        assert [b["reason"] for b in one["broken"]] == [b["reason"] for b in other["broken"]]
    assert [short(group) for group in page["duplicates"]] == [short(group) for group in of_shards["duplicates"]]


def test_reencoded_images_with_their_original_names_are_not_odd(root, tmp_path):
    dataset = packed(root, tmp_path / "out", reencode=90)
    assert not [kind for kind in verify(dataset, 1)["train"].odd if " named " in kind]


@pytest.mark.parametrize("workers", [1, 4])
def test_the_number_of_workers_does_not_matter(root, page, workers):
    dataset = opened(root)
    assert verify_report.report(dataset, verify(dataset, workers)) == page


@pytest.mark.parametrize("change", ["byte", "label", "order"])
def test_the_content_changes_with_a_byte_a_label_and_the_order(tmp_path, change):
    root = tree(tmp_path / "root", *(f"{split}/{c}/{i}.png" for split in ("train", "val") for c in "ab" for i in range(3)))
    before = verify(opened(root), 1)["train"].content
    one, two = root / "train" / "a" / "0.png", root / "train" / "a" / "1.png"
    match change:
        case "byte":
            two.write_bytes(two.read_bytes()[:-1] + b"\0")
        case "label":
            two.rename(root / "train" / "b" / "00.png")
        case "order":
            first, second = one.read_bytes(), two.read_bytes()
            one.write_bytes(second), two.write_bytes(first)
    assert verify(opened(root), 1)["train"].content != before


def test_every_flipped_bit_of_a_sample_is_found_in_shards(tmp_path):
    """Also in tar headers and labels, which training does not read."""
    for i in range(6):
        put(tmp_path / "root" / ("train", "val")[i // 4] / "ab"[i % 2] / f"{i}.jpg", encode(noise(20, 20, i), "JPEG"))
    out = tmp_path / "out"
    samples = packed(tmp_path / "root", out).train
    draw = random.Random(0)
    file = out / "train-00000.tar"
    clean = file.read_bytes()
    ends = [*(samples.records["offset"] - samples.records["head"]).tolist()[1:], len(clean) - 1024]
    for index, (record, end) in enumerate(zip(samples.records, ends, strict=True)):
        start, after = int(record["offset"]), int(record["offset"] + record["length"])
        for first, last, reason in (
            (start - int(record["head"]), start, "the tar header at byte"),
            (start, after, "wrong checksum of sample"),
            (after, end, "the label at byte"),
        ):
            for _ in range(5):
                damaged = bytearray(clean)
                damaged[draw.randrange(first, last)] ^= 1 << draw.randrange(8)
                file.write_bytes(damaged)
                broken = verify(shards.open_dataset(out), 2)["train"].broken
                assert list(broken) == [index]
                assert reason in broken[index]


def test_a_header_that_is_not_valid_utf8_makes_only_the_name_unreadable(tmp_path, capsys):
    """Names over 100 bytes have a header of their own, in UTF-8."""
    root = tree(tmp_path / "root", "train/a/" + "long" * 40 + ".png", "train/b/2.png", "val/a/3.png", "val/b/4.png")
    samples = packed(root, tmp_path / "out").train
    file = tmp_path / "out" / "train-00000.tar"
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(b"longlong", int(samples.records["offset"][0] - samples.records["head"][0]) + 512) + 9] ^= 0x80
    file.write_bytes(damaged)
    assert data("verify", "--root", tmp_path / "out") == 65
    assert "the tar header at byte 1,024 of its shard is damaged" in capsys.readouterr().out


# The command -------------------------------------------------------------------------------------------------------


def test_verify_exits_with_65_above_max_broken_after_printing_everything(root, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert data("verify", "--root", root, "--report", report) == 65
    out, err = capsys.readouterr()
    assert "4 of 31 images are broken" in err
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


def test_a_report_that_cannot_be_written_is_refused_before_the_work(fails, root):
    assert "no such folder" in fails("data", "verify", "--root", root, "--report", "gone/report.json")


def test_names_cannot_contain_terminal_escapes(tmp_path, capsys):
    for split in ("train", "val"):
        for label in "ab":
            put(tmp_path / "root" / split / label / "x\x1b[31mred.jpg", b"")
    data("verify", "--root", tmp_path / "root")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "x?[31mred.jpg" in out


def test_names_that_are_not_utf8_are_printed(tmp_path, capsys):
    root = tree(tmp_path / "root", "train/a/1.png", "train/b/2.png", "val/a/3.png", "val/b/4.png")
    try:
        Path(os.fsdecode(os.fsencode(root / "train" / "a") + b"/\xff.jpg")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system only supports UTF-8 names")
    report, page = tmp_path / "report.json", tmp_path / "sheet.html"
    assert data("verify", "--root", root, "--report", report) == 65
    assert "?.jpg: empty file" in capsys.readouterr().out
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


def test_another_kind_of_sheet_is_refused(fails, root):
    assert "must end in .png or .html" in fails("data", "info", root, "--sheet", "sheet.pdf")
    assert "must be at least 1" in fails("data", "info", root, "--images", "0")


def test_nothing_is_written_into_the_dataset(root, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    out = tmp_path / "out"
    packed(root, out)
    of_shards = files(out)
    data("verify", "--root", root), data("info", root), data("verify", "--root", out), data("info", out)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert files(out) == of_shards
