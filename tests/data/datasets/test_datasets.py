"""Opening datasets: layouts, cached listings, and the errors if something is missing."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from trees import Trap, image_bytes, opened, put, refusal, relative_names, settle, tree, two_classes
from worldsize.config.recipe import Data
from worldsize.data.datasets import digits, file_index, listing_cache


@pytest.fixture
def scans(monkeypatch) -> list[str]:
    """Folders that were listed."""
    listed: list[str] = []
    real = os.scandir

    def counting(path):
        listed.append(os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", counting)
    return listed


@pytest.mark.parametrize("val", ["val", "validation", "test"])
def test_the_held_out_folder_may_have_any_of_three_names(tmp_path, val):
    data = opened(two_classes(tmp_path / "root", val))
    assert (len(data.train), len(data.val)) == (3, 2)
    assert data.classes == data.val.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.val.labels.tolist() == [0, 1]
    assert data.train.labels.dtype == np.int32


def test_val_is_preferred_to_test(tmp_path):
    root = two_classes(tmp_path / "root")
    tree(root, "test/cat/x.png", "test/dog/y.png", "test/dog/z.png")
    assert relative_names(opened(root).val) == ["cat/4.png", "dog/5.png"]


def test_images_are_the_ones_named(tmp_path):
    data = opened(two_classes(tmp_path / "root"))
    assert [data.train.image(i).getpixel((0, 0)) for i in range(3)] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_files_that_are_not_images_are_not_listed(tmp_path):
    root = two_classes(tmp_path / "root")
    for name, content in {
        "README.txt": b"about these",
        "LICENSE": b"free",
        ".DS_Store": b"\0\0\0\1Bud1",
        "._1.png": image_bytes(),
        "labels.csv": b"a,b",
        "Thumbs.db": b"\xd0\xcf\x11\xe0",
        "empty": b"",
    }.items():
        put(root / "train" / "cat" / name, content)
    (root / "train" / "cat" / "subfolder").mkdir()
    (root / "train" / ".git").mkdir()
    put(root / "train" / "README.md", b"about this")
    assert relative_names(opened(root).train) == ["cat/1.png", "cat/2.png", "dog/3.png"]


def test_a_folder_named_like_an_image_is_not_listed(tmp_path):
    root = two_classes(tmp_path / "root")
    (root / "train" / "cat" / "odd.png").mkdir()
    assert relative_names(opened(root).train) == ["cat/1.png", "cat/2.png", "dog/3.png"]


def test_an_image_is_found_by_its_content_or_its_extension(tmp_path):
    root = two_classes(tmp_path / "root")
    put(root / "train" / "cat" / "no_extension")
    put(root / "train" / "cat" / "n01.dat", image_bytes(kind="JPEG"))
    put(root / "train" / "cat" / "UPPER.JPEG", image_bytes())
    assert relative_names(opened(root).train) == [
        "cat/1.png",
        "cat/2.png",
        "cat/UPPER.JPEG",
        "cat/n01.dat",
        "cat/no_extension",
        "dog/3.png",
    ]
    assert opened(root).train.image(2).size == (8, 8)


def test_classes_and_images_are_sorted_by_their_bytes(tmp_path):
    names = ["Zebra", "apple", "äther", "b10", "b9", "éclair"]
    paths = [f"{split}/{c}/{f}.png" for split in ("train", "val") for c in names for f in ("b", "B", "ä", "10", "9")]
    data = opened(tree(tmp_path / "root", *paths))
    assert data.classes == tuple(sorted(names, key=os.fsencode)) == ("Zebra", "apple", "b10", "b9", "äther", "éclair")
    assert relative_names(data.train)[:5] == [f"Zebra/{f}.png" for f in ("10", "9", "B", "b", "ä")]


def test_names_that_are_not_utf8_are_read_as_they_are(tmp_path):
    root = two_classes(tmp_path / "root")
    try:
        Path(os.fsdecode(os.fsencode(root / "train" / "cat") + b"/\xff\xfe.png")).write_bytes(image_bytes())
    except OSError:
        pytest.skip("this file system only supports UTF-8 names")
    assert opened(root).train.image(2).size == (8, 8)


def test_a_class_whose_name_is_not_utf8_is_listed(tmp_path):
    root = two_classes(tmp_path / "root")
    try:
        for split in ("train", "val"):
            put(Path(os.fsdecode(os.fsencode(root / split) + b"/\xff/1.png")))
    except OSError:
        pytest.skip("this file system only supports UTF-8 names")
    data = opened(root)
    assert len(data.classes) == 3
    assert data.train.image(3).size == (8, 8)


def test_a_linked_class_is_a_class(tmp_path):
    root = two_classes(tmp_path / "root")
    put(tmp_path / "elsewhere" / "6.png")
    for split in ("train", "val"):
        (root / split / "emu").symlink_to(tmp_path / "elsewhere")
    assert opened(root).classes == ("cat", "dog", "emu")


def test_a_link_that_leads_back_to_itself_is_not_a_class(tmp_path):
    root = two_classes(tmp_path / "root")
    (root / "train" / "loop").symlink_to("loop")
    assert opened(root).classes == ("cat", "dog")


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    two_classes(tmp_path / "root")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(opened(Path("~/root"), cache=tmp_path / "cache").train) == 3


def test_no_root_is_refused():
    assert "--data.root" in refusal(None)


def test_a_root_that_is_missing_is_refused(tmp_path):
    assert "no such folder" in refusal(tmp_path / "gone")


def test_a_root_that_is_a_file_is_refused(tmp_path):
    assert "is a file" in refusal(put(tmp_path / "file"))


def test_the_error_for_an_empty_root_names_the_layout(tmp_path):
    (tmp_path / "root").mkdir()
    message = refusal(tmp_path / "root")
    assert "missing: train" in message
    assert "train/CLASS/IMAGE" in message


def test_the_error_for_a_missing_validation_folder_lists_its_names(tmp_path):
    message = refusal(tree(tmp_path / "root", "train/cat/1.png", "train/dog/2.png"))
    assert "missing: val" in message
    assert "validation or test" in message


def test_a_single_class_is_refused(tmp_path):
    message = refusal(tree(tmp_path / "root", "train/cat/1.png", "val/cat/2.png"))
    assert "only one class, 'cat'" in message


def test_a_train_folder_without_classes_is_refused(tmp_path):
    root = two_classes(tmp_path / "root")
    shutil.rmtree(root / "train")
    put(root / "train" / "1.png")
    assert "contains no class folders" in refusal(root)


def test_classes_that_differ_are_named(tmp_path):
    root = two_classes(tmp_path / "root")
    tree(root, "train/emu/1.png", "val/fox/1.png")
    message = refusal(root)
    assert "only in train: emu" in message
    assert "only in val: fox" in message


def test_of_many_classes_that_differ_only_some_are_named(tmp_path):
    root = two_classes(tmp_path / "root")
    tree(root, *(f"train/emu{i}/1.png" for i in range(50)))
    message = refusal(root)
    assert "and more" in message
    assert len(message) < 500


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_without_images_is_named(tmp_path, split):
    root = two_classes(tmp_path / "root")
    for path in (root / split / "dog").iterdir():
        path.unlink()
    put(root / split / "dog" / "notes.txt", b"to do")
    expected = f"{root / split / 'dog'} contains no images: add some, or remove the folder if it is not a class"
    assert refusal(root) == expected


@pytest.mark.parametrize("forbidden", ["train", "train/dog", "val"])
def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch, forbidden):
    root = two_classes(tmp_path / "root")
    real = os.scandir

    def refusing(path):
        if Path(path) == root / forbidden:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert refusal(root) == f"cannot list {root / forbidden}: Permission denied"


@pytest.fixture
def settled(tmp_path) -> Path:
    root = two_classes(tmp_path / "root")
    settle(root)
    return root


def test_a_second_listing_scans_no_class_folder(settled, scans):
    first = opened(settled)
    assert str(settled / "train" / "cat") in scans
    scans.clear()
    second = opened(settled)
    assert set(scans) <= {str(settled / "train"), str(settled / "val")}
    assert second.fingerprint == first.fingerprint
    assert relative_names(second.train) == relative_names(first.train)
    assert second.train.labels.tolist() == first.train.labels.tolist()
    assert second.train.image(2).getpixel((0, 0)) == (0, 0, 255)


def test_the_same_folder_by_another_path_uses_the_cache(settled, scans, tmp_path):
    opened(settled)
    (tmp_path / "link").symlink_to(settled)
    scans.clear()
    opened(tmp_path / "link")
    assert len(scans) == 2


@pytest.mark.parametrize("change", ["add", "rename", "remove", "new class"])
def test_a_changed_folder_is_listed_again(settled, change):
    opened(settled)
    cat = settled / "train" / "cat"
    match change:
        case "add":
            put(cat / "9.png")
        case "rename":
            (cat / "2.png").rename(cat / "0.png")
        case "remove":
            (cat / "2.png").unlink()
        case "new class":
            tree(settled, "train/emu/1.png", "val/emu/1.png")
    expected = sorted(os.path.relpath(p, settled / "train") for p in (settled / "train").rglob("*.png"))
    assert relative_names(opened(settled).train) == expected


@pytest.mark.parametrize("damage", [b"", b"not an index", bytes(1000), "half", "zeroed"])
def test_a_damaged_cache_is_ignored_and_replaced(settled, caplog, scans, damage):
    expected = opened(settled).fingerprint
    for store in (settled.parent / "cache").iterdir():
        data = store.read_bytes()
        if damage == "half":
            store.write_bytes(data[: len(data) // 2])
        elif damage == "zeroed":
            store.write_bytes(data[: len(data) // 3] + bytes(50) + data[len(data) // 3 + 50 :])
        else:
            store.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "worldsize"):
        assert opened(settled).fingerprint == expected
    assert "damaged" in caplog.text
    scans.clear()
    assert opened(settled).fingerprint == expected
    assert len(scans) == 2


def test_pickles_in_a_cache_are_not_loaded(settled):
    expected = opened(settled).fingerprint
    stores = list((settled.parent / "cache").iterdir())
    for store in stores:
        np.savez(store, stamp=np.array([Trap(settled / "sprung")], object), files=1, ends=1, labels=1)
    assert opened(settled).fingerprint == expected
    assert not (settled / "sprung").exists()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_cache_that_cannot_be_written_is_only_a_warning(settled, caplog, below):
    file = put(settled.parent / "file")
    with caplog.at_level(logging.WARNING, "worldsize"):
        assert len(opened(settled, cache=file / below).train) == 3
    assert "cannot cache" in caplog.text


def test_a_cache_that_may_not_be_written_is_nothing_to_warn_of(settled, caplog, monkeypatch):
    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(listing_cache, "replacing", refuse)
    with caplog.at_level(logging.WARNING, "worldsize"):
        assert len(opened(settled).train) == 3
    assert caplog.text == ""


def test_no_temporary_files_are_left(settled):
    opened(settled)
    assert {p.suffix for p in (settled.parent / "cache").iterdir()} == {".npz"}


@pytest.mark.parametrize("change", ["add", "rename", "move", "rename class"])
def test_a_fingerprint_changes_with_the_files(tmp_path, change):
    root = two_classes(tmp_path / "root")
    settle(root)
    before = opened(root).train.fingerprint
    train = root / "train"
    match change:
        case "add":
            put(train / "cat" / "9.png")
        case "rename":
            (train / "cat" / "2.png").rename(train / "cat" / "7.png")
        case "move":
            (train / "cat" / "2.png").rename(train / "dog" / "2.png")
        case "rename class":
            for split in ("train", "val"):
                (root / split / "cat").rename(root / split / "cow")
    assert opened(root).train.fingerprint != before


def test_a_fingerprint_does_not_change_with_the_place(tmp_path):
    root = two_classes(tmp_path / "root")
    before = opened(root).fingerprint
    shutil.move(root, tmp_path / "moved")
    assert opened(tmp_path / "moved").fingerprint == before


def test_names_do_not_run_together_in_a_fingerprint(tmp_path):
    one = tree(tmp_path / "one", *(f"{s}/{c}/{f}" for s in ("train", "val") for c in "ab" for f in ("x.png", "y.png")))
    two = tree(tmp_path / "two", *(f"{s}/{c}/{f}" for s in ("train", "val") for c in "ab" for f in ("x.pngy.png",)))
    assert opened(one).train.fingerprint != opened(two).train.fingerprint


def test_an_index_costs_at_most_150_bytes_a_sample(tmp_path, monkeypatch):
    classes, each = 100, 1000
    names = {f"n{c:08}": [b"n%08d_%d.JPEG" % (c, 10_000 + i) for i in range(each)] for c in range(classes)}
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(file_index, "_images", lambda folder, *_: names[folder.name])
    for _ in ("listed", "cached"):
        gc.collect()
        tracemalloc.start()
        samples = file_index.list_classes(tmp_path, names, tmp_path / "cache")
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(samples) == classes * each
        assert kept / len(samples) <= 150
        assert peak / len(samples) <= 300
        assert samples.name(12_345) == str(tmp_path / "n00000012" / "n00000012_10345.JPEG")


def test_digits_are_those_of_scikit_learn():
    found = digits.open_dataset(Data(name="digits", train_crop_size=8, val_resize_size=8, val_crop_size=8), Path())
    pixels = np.concatenate([part.pixels[..., 0] for part in (found.train, found.val)])
    labels = np.concatenate([part.labels for part in (found.train, found.val)])
    expected, names = load_digits(return_X_y=True)
    expected = np.rint(expected * (255 / 16)).astype(np.uint8)
    assert sorted(zip(labels.tolist(), pixels.reshape(-1, 64).tolist(), strict=True)) == sorted(
        zip(names.tolist(), expected.tolist(), strict=True)
    )
