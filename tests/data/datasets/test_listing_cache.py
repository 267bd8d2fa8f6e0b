"""A cached listing is used only as long as its evidence holds, and a resumed run notices other names and sizes."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from folders import folder_recipe, images
from packing import packed
from trees import LONG_AGO, image_bytes, opened, put, relative_names, settle, tree, two_classes
from worldsize import cli
from worldsize.data import file_sizes, read_errors
from worldsize.data.datasets import listing_cache
from worldsize.errors import ReadFailed


@pytest.fixture
def root(tmp_path) -> Path:
    root = two_classes(tmp_path / "root")
    settle(root)
    return root


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """One entry for each listing that was not taken from the cache."""
    counted: list[int] = []
    real = listing_cache.of_folders

    def counting(root, names, store, make):
        def counted_make():
            counted.append(1)
            return make()

        return real(root, names, store, counted_make)

    monkeypatch.setattr(listing_cache, "of_folders", counting)
    return counted


def unpack(archive: Path, root: Path, names: list[str]) -> None:
    """Unpack an archive of images in which all times are the same."""
    with tarfile.open(archive, "w") as file:
        for path in ("train", "train/cat", "train/dog", "val", "val/cat", "val/dog"):
            folder = tarfile.TarInfo(path)
            folder.type, folder.mtime, folder.mode = tarfile.DIRTYPE, LONG_AGO // 10**9, 0o755
            file.addfile(folder)
        for path in names:
            put(archive.with_name("image.png"))
            file.add(archive.with_name("image.png"), path, filter=lambda info: info)
    with tarfile.open(archive) as file:
        file.extractall(root, filter="tar")
    settle(root)


def test_two_archives_with_the_same_times_are_two_datasets(tmp_path):
    root = tmp_path / "root"
    first = [f"{split}/{name}/{i}.png" for split in ("train", "val") for name in ("cat", "dog") for i in range(3)]
    unpack(tmp_path / "a.tar", root, first)
    before = opened(root)
    shutil.rmtree(root)
    unpack(tmp_path / "b.tar", root, [*first, "train/cat/7.png", "val/dog/8.png"])
    after = opened(root)
    assert (len(before.train), len(after.train), len(after.val)) == (6, 7, 7)
    assert before.fingerprint != after.fingerprint


def test_a_time_that_was_set_back_hides_no_change(root):
    assert len(opened(root).train) == 3
    put(root / "train" / "cat" / "9.png")
    (root / "train" / "dog" / "3.png").rename(root / "train" / "dog" / "8.png")
    settle(root)
    assert relative_names(opened(root).train) == ["cat/1.png", "cat/2.png", "cat/9.png", "dog/8.png"]


def test_a_link_that_leads_elsewhere_is_another_folder(root, tmp_path):
    for name in ("one", "two"):
        tree(tmp_path / name, f"{name}.png", *(["more.png"] if name == "two" else []))
        settle(tmp_path / name)
        os.utime(tmp_path / name, ns=(LONG_AGO, LONG_AGO))
    for split in ("train", "val"):
        (root / split / "emu").symlink_to(tmp_path / "one")
    assert len(opened(root).train) == 4
    for split in ("train", "val"):
        (root / split / "emu").unlink()
        (root / split / "emu").symlink_to(tmp_path / "two")
    settle(root)
    assert len(opened(root).train) == 5


def test_every_change_is_seen_even_in_the_same_instant(root):
    for number in range(8):
        put(root / "train" / "cat" / f"new{number}.png", b"\x89PNG\r\n")
        assert len(opened(root).train) == 4 + number


def test_a_file_without_an_extension_that_is_filled_later_is_seen(root):
    (root / "train" / "cat" / "photo").touch()
    settle(root)
    assert len(opened(root).train) == 3
    (root / "train" / "cat" / "photo").write_bytes(image_bytes())  # changes no folder
    assert relative_names(opened(root).train) == ["cat/1.png", "cat/2.png", "cat/photo", "dog/3.png"]
    (root / "train" / "cat" / "photo").write_bytes(b"")
    assert len(opened(root).train) == 3


def test_a_local_folder_is_listed_once(root, made):
    if listing_cache._kind(root) not in listing_cache._LOCAL:
        pytest.skip("temporary files are not on a local file system")
    for _ in range(3):
        opened(root)
    assert len(made) == 2


@pytest.mark.parametrize("place", ["network", "read-only", "unknown", "clock"])
def test_where_times_prove_nothing_each_run_lists_the_folder(root, made, monkeypatch, place):
    match place:
        case "network":
            monkeypatch.setattr(listing_cache, "_kind", lambda path: 0x6969)  # NFS
        case "read-only":
            monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
        case "unknown":
            monkeypatch.setattr(listing_cache.sys, "platform", "darwin")
        case "clock":
            monkeypatch.setattr(listing_cache.time, "time", lambda: 1.0)
    for _ in range(2):
        opened(root)
    assert len(made) == 4
    assert not list((root.parent / "cache").glob("*"))


def test_constant_times_of_a_mount_hide_no_change(root, monkeypatch):
    monkeypatch.setattr(listing_cache, "_kind", lambda path: 0x65735546)  # FUSE
    constant = os.stat(root)
    monkeypatch.setattr(listing_cache, "_statuses", lambda folders: [(path, constant) for path in folders])
    assert len(opened(root).train) == 3
    put(root / "train" / "cat" / "9.png")
    assert len(opened(root).train) == 4


def test_sizes_change_with_a_file_and_are_those_of_shards(root, tmp_path):
    before = file_sizes.digest(opened(root))
    packed(root, tmp_path / "shards")
    assert file_sizes.digest(opened(tmp_path / "shards")) == before
    put(root / "val" / "dog" / "5.png", image_bytes(kind="BMP"))
    after = file_sizes.digest(opened(root))
    assert after["train"] == before["train"] and after["val"] != before["val"]


def test_of_many_files_some_are_looked_at_everywhere(root, monkeypatch):
    tree(root, *(f"train/cat/{i:03}.png" for i in range(100)))
    monkeypatch.setattr(file_sizes, "LOOKED_AT", 10)
    before = file_sizes.digest(opened(root))
    for path in (root / "train" / "cat").iterdir():
        path.write_bytes(image_bytes(kind="BMP"))
    assert file_sizes.digest(opened(root)) != before


def test_sizes_on_a_failing_disk_are_not_zero(root, monkeypatch):
    def fails(path):
        raise OSError(errno.EIO, "Input/output error", path)

    dataset = opened(root)
    monkeypatch.setattr(read_errors, "RETRY_DELAYS_S", ())
    monkeypatch.setattr("worldsize.data.file_samples.os.stat", fails)
    with pytest.raises(ReadFailed):
        file_sizes.digest(dataset)


def test_a_resume_with_other_files_of_the_same_names_is_refused(tmp_path, monkeypatch, capfd):
    root = images(tmp_path / "images", {"cat": 12, "dog": 12}, {"cat": 3, "dog": 3})
    recipe = folder_recipe(tmp_path, root)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", recipe, "--name", "a", "--max-steps", "3", "--stop-after", "1"]) == 75
    images(tmp_path / "others", {"cat": 12, "dog": 12}, {"cat": 3, "dog": 3}, size=48)
    shutil.rmtree(root / "train")
    (tmp_path / "others" / "train").rename(root / "train")
    capfd.readouterr()
    assert cli.main(["train", "--resume", "runs/a"]) == 64
    err = capfd.readouterr().err
    assert "the dataset: the images of train have the same names, but other sizes in bytes" in err
    assert "--allow-changes" in err
