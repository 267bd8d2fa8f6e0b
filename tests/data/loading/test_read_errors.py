"""Errors of a disk, a network or a limit are no property of an image: reads are repeated, and the run ends with 69."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from test_loader import evaluated, in_files, make

from folders import folder_recipe, images
from trees import opened, two_classes
from worldsize import cli
from worldsize.data import shards
from worldsize.data.datasets import file_index
from worldsize.data.images import native
from worldsize.data.images.pillow import BrokenImage
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.errors import Forbidden, ReadFailed, StoreUnreachable, of_the_place

PLAN = BatchPlan(29, 29, 1)


@pytest.fixture
def delays(monkeypatch) -> list[float]:
    """The pauses between tries, which take no time."""
    slept: list[float] = []
    # A listing pauses too, for milliseconds.
    monkeypatch.setattr("time.sleep", lambda seconds: slept.append(seconds) if seconds >= 1 else None)
    return slept


@pytest.fixture
def failing(monkeypatch, delays):
    """failing(name, code, times): the first opens of the file with this name fail."""

    def make_fail(name: str, code: int, times: int = 10**9) -> None:
        real, real_files, left = os.open, native.Native.files, [times]

        def refusing(path, *arguments, **options):
            if os.fsdecode(path).endswith(name) and left[0]:
                left[0] -= 1
                raise OSError(code, os.strerror(code), os.fspath(path))
            return real(path, *arguments, **options)

        def leaving(self, paths):
            contents, checksums = real_files(self, paths)
            left_out = [left[0] and os.fsdecode(path).endswith(name) for path in paths]
            return [None if out else content for content, out in zip(contents, left_out, strict=True)], checksums

        monkeypatch.setattr(os, "open", refusing)
        monkeypatch.setattr(native.Native, "files", leaving)

    return make_fail


def trained(samples, **options):
    loader = make(samples, workers=2, **options)
    try:
        batches = list(loader.training(PLAN, 0, 0))
    finally:
        loader.close()
    return batches, loader.broken


CODES = ["EIO", "ESTALE", "ETIMEDOUT", "EMFILE", "ENFILE", "ENOMEM", "ENOTCONN", "EREMOTEIO", "EBADMSG", "ENODEV"]


@pytest.mark.parametrize("code", CODES)
def test_a_read_that_fails_for_a_while_changes_nothing(tmp_path, failing, delays, code):
    samples = in_files(tmp_path)
    (expected,), _ = trained(samples)
    scored = evaluated(samples, 1, crop="resized")
    failing("/007.png", getattr(errno, code), times=5)
    (batch,), broken = trained(samples)
    assert delays == [1, 2, 4, 8, 8]
    assert broken.new == {}
    assert torch.equal(batch.pixels, expected.pixels) and batch.indices.tolist() == expected.indices.tolist()
    failing("/007.png", getattr(errno, code), times=1)
    again = evaluated(samples, 1, crop="resized")
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(again, scored, strict=True))


def test_a_lasting_error_names_the_file_and_the_error_and_others_do_not_wait(tmp_path, failing, delays):
    samples = in_files(tmp_path)
    failing(".png", errno.EIO)
    with pytest.raises(ReadFailed, match=r"0\d\d\.png cannot be read: Input/output error.*not of the image") as caught:
        trained(samples)
    assert caught.value.exit_code == 69 and caught.value.of_one_rank
    delays.clear()
    with pytest.raises(ReadFailed):
        samples.encoded(3)
    assert delays == []


def test_the_limit_of_open_files_names_the_remedy(tmp_path, failing):
    samples = in_files(tmp_path)
    failing("/003.png", errno.EMFILE)
    with pytest.raises(ReadFailed, match="Too many open files; raise the limit of open files"):
        samples.encoded(3)


def test_a_file_that_may_not_be_read_is_not_broken(tmp_path, failing, delays):
    samples = in_files(tmp_path)
    failing("/003.png", errno.EACCES)
    with pytest.raises(Forbidden, match=r"003\.png cannot be read: Permission denied; check its permissions") as caught:
        samples.encoded(3)
    assert caught.value.exit_code == 64 and delays == []


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "links"])
def test_a_volume_that_vanishes_breaks_no_image(tmp_path, delays, left):
    samples = in_files(tmp_path)
    train, away = tmp_path / "train", tmp_path / "away"
    train.rename(away)
    match left:
        case "an empty folder":  # a mount point
            for name in "abc":
                (train / name).mkdir(parents=True)
        case "links":
            for path in list(away.rglob("*.png")):
                link = train / path.relative_to(away)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(tmp_path / "unmounted" / path.name)
    with pytest.raises(ReadFailed, match="No such file or directory, and neither can its folder: its volume is gone"):
        trained(samples)
    with pytest.raises(ReadFailed):
        samples.length(0)


def test_a_volume_that_returns_in_time_changes_nothing(tmp_path, monkeypatch):
    samples = in_files(tmp_path)
    expected = samples.encoded(3)
    (tmp_path / "train").rename(tmp_path / "away")
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / "away").rename(tmp_path / "train"))
    assert samples.encoded(3) == expected


def test_a_file_that_was_removed_is_still_a_broken_image(tmp_path, delays):
    samples = in_files(tmp_path)
    Path(samples.name(3)).unlink()
    with pytest.raises(BrokenImage, match="No such file"):
        samples.encoded(3)
    assert delays == []


@pytest.mark.parametrize("decoder", ["native", "pillow"])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_shard_whose_disk_fails_breaks_no_image(copied, monkeypatch, delays, decoder, lasting):
    if decoder == "native" and native.load() is None:
        pytest.skip("the native library is not built")
    if decoder == "pillow":
        monkeypatch.setattr(native, "load", lambda: None)
    samples = shards.open_dataset(copied).train
    everything = range(len(samples))
    expected = [bytes(samples.encoded(i)) for i in everything]
    left = [10**9 if lasting else 3]
    real_read, real_pread = native.Native.read, os.pread

    def failed() -> bool:
        left[0] -= 1
        return left[0] >= 0

    def read(self, files, offsets, sizes):
        found = real_read(self, files, offsets, sizes)
        return [OSError(errno.ESTALE, "Stale file handle") if failed() else one for one in found]

    def pread(file, *arguments):
        if failed():
            raise OSError(errno.ESTALE, "Stale file handle")
        return real_pread(file, *arguments)

    monkeypatch.setattr(native.Native, "read", read)
    monkeypatch.setattr(os, "pread", pread)
    if lasting:
        with pytest.raises(ReadFailed, match=r"train-00000\.tar cannot be read: Stale file handle"):
            samples.encoded(0)
    else:
        assert [bytes(samples.encoded(i)) for i in everything] == expected


def test_shards_on_a_disk_that_fails_are_not_damaged(copied, failing):
    failing("/train-00000.tar", errno.EIO)
    with pytest.raises(StoreUnreachable, match=r"train-00000\.tar cannot be read: Input/output error"):
        shards.open_dataset(copied)


def test_verify_tells_broken_images_from_a_failing_disk(tmp_path, failing, capsys):
    root = two_classes(tmp_path / "root")
    (root / "train" / "dog" / "3.png").write_bytes(b"no image")
    failing("/cat/2.png", errno.EIO)
    assert cli.main(["data", "verify", "--root", str(root), "--max-broken", "1"]) == 69
    out, err = capsys.readouterr()
    assert "broken (1):\n" in out and "3.png: " in out.split("broken (1):\n")[1].splitlines()[0]
    assert "not read, which says nothing about the images (1):\n" in out
    assert "2.png cannot be read: Input/output error" in out.split("not read")[1].splitlines()[1]
    assert "content unknown" in out
    assert "cat/2.png cannot be read: Input/output error" in err


@pytest.mark.parametrize("place", ["train", "train/cat", "an entry", "a link"])
def test_a_listing_that_fails_is_not_the_users_mistake(tmp_path, monkeypatch, place):
    root = two_classes(tmp_path / "root")
    (root / "train" / "cat" / "noname").write_bytes((root / "train" / "cat" / "1.png").read_bytes())

    def fails(*_):
        raise OSError(errno.ESTALE, "Stale file handle", "it")

    real = os.scandir
    if place == "an entry":
        monkeypatch.setattr(file_index, "open", fails, raising=False)
    elif place == "a link":
        monkeypatch.setattr(file_index, "is_folder", fails)
    else:
        monkeypatch.setattr(os, "scandir", lambda path: fails() if Path(path) == root / place else real(path))
    with pytest.raises(StoreUnreachable, match="Stale file handle"):
        opened(root)


def test_retryable_errors_are_those_of_the_place():
    assert all(of_the_place(OSError(getattr(errno, code), "")) for code in CODES if code != "ENODEV")
    assert not any(of_the_place(OSError(getattr(errno, code), "")) for code in ("ENOENT", "EACCES", "ENOSPC", "EROFS"))


def test_a_run_that_cannot_read_ends_with_69(tmp_path, monkeypatch, failing, capfd):
    root = images(tmp_path / "images", {"cat": 12, "dog": 12}, {"cat": 3, "dog": 3})
    recipe = folder_recipe(tmp_path, root)
    monkeypatch.chdir(tmp_path)
    failing("/cat/003.png", errno.EIO)
    assert cli.main(["train", recipe, "--max-steps", "3"]) == 69
    err = capfd.readouterr().err
    assert f"worldsize: {root}/train/cat/003.png cannot be read: Input/output error" in err
    assert "broken" not in err and "Traceback" not in err
