"""What `worldsize data verify` finds in images of every kind."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
from PIL import Image

from packing import BROKEN, SPECIAL, colour_png, encode, noise, packed, special_files
from surveyed import data
from trees import opened, put, tree, two_classes
from worldsize.data import shards
from worldsize.data.survey import verify_report
from worldsize.data.survey.verify import verify


def short(names) -> set[str]:
    return {name.rsplit("/", 1)[-1] for name in names}


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
