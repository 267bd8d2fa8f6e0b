"""`worldsize data pack`: the same bytes from the same pictures, whatever interrupts it."""

from __future__ import annotations

import fcntl
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from packing import BROKEN, encode, files, noise, odd_folder, packed
from processes import identical, start, weights, worldsize
from trees import opened, put, two_classes
from worldsize.data import shards
from worldsize.data.crops import fit
from worldsize.data.decode import BrokenPicture, decode
from worldsize.data.order import permute
from worldsize.data.samples import ArraySamples, Dataset
from worldsize.data.shards import pack as pack_module
from worldsize.data.shards.format import Kind
from worldsize.data.shards.pack import pack
from worldsize.data.shards.pictures import How, store
from worldsize.data.shards.write import Task, plan, write, written
from worldsize.errors import DataError, UserError

OPTIONS = [{}, {"reencode": 80, "max_side": 40}, {"raw": 24}]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return odd_folder(tmp_path_factory.mktemp("originals") / "root")


# The same bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_the_number_of_workers_does_not_change_a_byte(root, tmp_path, how):
    packed(root, tmp_path / "one", workers=1, **how)
    packed(root, tmp_path / "four", workers=4, **how)
    assert files(tmp_path / "one") == files(tmp_path / "four")
    assert len(list((tmp_path / "one").glob("train-*.tar"))) > 1


def test_shards_of_shards_remember_how_they_were_made(root, tmp_path):
    first = packed(root, tmp_path / "first", reencode=80)
    pack(first, tmp_path / "second", How(), 5000, 2, 1.0)
    second = shards.open_dataset(tmp_path / "second")
    assert second.train.made == first.train.made != {}
    assert second.fingerprint == first.fingerprint


def test_times_owners_and_places_of_the_originals_do_not_matter(root, tmp_path):
    other = shutil.copytree(root, tmp_path / "elsewhere")
    for file in other.rglob("*.*"):
        os.utime(file, (1e9, 1e9))
        if file.is_file():
            file.chmod(0o600)
    packed(root, tmp_path / "one")
    packed(other, tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_shards_can_be_packed_again(root, tmp_path, how):
    """The same pictures from shards of another size."""
    packed(root, tmp_path / "small", shard_bytes=5000)
    pack(shards.open_dataset(tmp_path / "small"), tmp_path / "again", How(**how), 20_000, 2, 1.0)
    packed(root, tmp_path / "straight", **how)
    assert files(tmp_path / "again") == files(tmp_path / "straight")


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([512, 1536, 2048])), max_size=60), st.integers(1, 20_000))
def test_a_plan_holds_every_picture_once_and_no_shard_is_too_large(pictures, limit):
    lengths, heads = np.array(pictures, np.int64).reshape(-1, 2).T
    tasks = plan("train", lengths, heads, limit)
    assert [i for task in tasks for i in range(task.start, task.stop)] == list(range(len(lengths)))
    assert [task.number for task in tasks] == list(range(len(tasks)))
    assert all(task.bytes <= limit or task.stop - task.start == 1 for task in tasks)
    assert all(one.bytes + two.bytes > limit for one, two in pairwise(tasks) if two.stop - two.start == 1)


def test_a_plan_knows_the_bytes(root, tmp_path):
    samples = packed(root, tmp_path / "out").train
    lengths = np.array([samples.length(i) for i in range(len(samples))])
    for task, shard in zip(plan("train", lengths, samples.records["head"], 20_000), samples.shards, strict=True):
        assert shard.bytes == task.bytes


@pytest.mark.parametrize("extension", ["webp", "jpg"])
@pytest.mark.parametrize("length", [60, 91, 92, 93, 94, 200])  # of the name; a tar header takes 100
def test_no_shard_is_larger_than_asked_for_however_long_the_names(tmp_path, length, extension):
    data = encode(noise(8, 8), {"jpg": "JPEG"}.get(extension, extension))
    for path in ("train/a", "train/b", "val/a", "val/b"):
        for i in range(10):
            put(tmp_path / "root" / path / f"{i}".rjust(length, "n"), data)
    for source in (opened(tmp_path / "root"), packed(tmp_path / "root", tmp_path / "whole")):
        out = tmp_path / type(source.train).__name__
        pack(source, out, How(), 20_000, 2, 0)
        sizes = [file.stat().st_size for file in out.glob("*.tar")]
        assert 9_000 < max(sizes) <= 20_000


# Whatever interrupts it --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger(tmp_path_factory) -> Path:
    """Enough work for a second or so, so that it can be interrupted."""
    root = tmp_path_factory.mktemp("larger") / "root"
    for split, count in (("train", 60), ("val", 10)):
        for i in range(count):
            put(root / split / "ab"[i % 2] / f"{i}.jpg", encode(noise(700, 500, i), "JPEG", quality=90))
    return root


def command(root: Path, out: Path) -> list[str | Path]:
    return ["data", "pack", "--root", root, "--out", out, "--shard-mb", "0.3", "--workers", "2"]


@pytest.fixture(scope="module")
def unbroken(larger, tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    done = worldsize(*command(larger, out), cwd=out.parent)
    assert done.returncode == 0, done.stderr
    assert "50 pictures" not in done.stdout
    return files(out)


def interrupted(larger: Path, out: Path, number: int, after: int, delay: float = 0) -> int:
    """Send a signal when there are so many shards, and so many seconds later; the exit code."""
    running = start(*command(larger, out), cwd=out.parent)
    deadline = time.monotonic() + 60
    while running.poll() is None and time.monotonic() < deadline:
        if out.is_dir() and len(list(out.glob("*.tar"))) >= after:
            time.sleep(delay)
            running.send_signal(number)
            break
        time.sleep(0.001)
    running.communicate(timeout=60)
    return running.returncode


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_goes_on_to_the_same_bytes(larger, unbroken, tmp_path, seed):
    draw = random.Random(seed)
    out = tmp_path / "out"
    kills = 0
    for after in sorted(draw.sample(range(len(unbroken) - 4), 3)):
        code = interrupted(larger, out, signal.SIGKILL, after, draw.random() / 10)
        kills += code == -signal.SIGKILL
        if not (out / "index.json").exists() and list(out.glob("*.tar")):
            with pytest.raises(UserError, match="to its end"):
                shards.open_dataset(out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    done = worldsize(*command(larger, out), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert kills >= 1
    assert files(out) == unbroken
    assert all((out / name).stat().st_mtime_ns == at for name, at in before.items()), "done shards were made again"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_is_done(larger, unbroken, tmp_path, number):
    out = tmp_path / "out"
    assert interrupted(larger, out, number, 2) == 75
    assert len(list(out.glob("*.tar"))) >= 2
    done = worldsize(*command(larger, out), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert files(out) == unbroken


@pytest.mark.parametrize("damage", ["part lost", "part cut", "part changed", "tar of another", "tar cut", "tar lost"])
def test_what_was_left_half_done_is_done_again(root, tmp_path, monkeypatch, damage):
    """As after the machine went down."""
    packed(root, tmp_path / "unbroken")
    out = tmp_path / "out"
    with pytest.raises(DataError):
        packed(root, out, max_broken=0)
    part = out / ".packing" / "train-00001.tar.index"
    match damage:
        case "part lost":
            part.unlink()
        case "part cut":
            part.write_bytes(part.read_bytes()[:-8])
        case "part changed":
            part.write_bytes(bytes(len(part.read_bytes())))
        case "tar of another":
            shutil.copy(out / "train-00000.tar", out / "train-00001.tar")
        case "tar cut":
            os.truncate(out / "train-00001.tar", 5000)
        case "tar lost":
            (out / "train-00001.tar").unlink()
    packed(root, out)
    assert files(out) == files(tmp_path / "unbroken")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_plan_is_no_new_beginning(root, tmp_path, damage):
    out = tmp_path / "out"
    put(out / ".packing" / "plan.json", damage)
    with pytest.raises(DataError, match=r"plan\.json is damaged: remove .*--out"):
        packed(root, out)


def test_shards_that_were_cut_elsewhere_are_not_gone_on_with(root, tmp_path, monkeypatch):
    """As by a version that counts other bytes."""
    out = tmp_path / "out"
    with pytest.raises(DataError):
        packed(root, out, max_broken=0)
    monkeypatch.setattr(pack_module, "plan", lambda split, *others: plan(split, *others[:-1], others[-1] + 5000))
    with pytest.raises(UserError, match="other options"):
        packed(root, out)


def test_a_part_of_the_index_for_other_samples_is_not_taken(root, tmp_path):
    out, parts = tmp_path / "out", tmp_path / "parts"
    parts.mkdir(), out.mkdir()
    task = Task("train", 0, 0, 3, 5000)
    write(task, opened(root).train, How(), out, parts, lambda _: None)
    assert written(task, out, parts) is not None
    assert written(replace(task, stop=4), out, parts) is None


def test_a_second_time_does_nothing(root, tmp_path, capsys):
    packed(root, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    packed(root, tmp_path / "out")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert "is packed already" in capsys.readouterr().out


@pytest.mark.parametrize("whole", [True, False])
def test_other_options_and_other_pictures_are_refused(root, tmp_path, whole):
    out = tmp_path / "out"
    if whole:
        packed(root, out)
    else:
        with pytest.raises(DataError):
            packed(root, out, max_broken=0)
    before = files(out) if whole else None
    other = shutil.copytree(root, tmp_path / "other")
    put(other / "train" / "plain" / "0.jpg", encode(noise(90, 90, 77), "JPEG"))
    for change in ({"raw": 24}, {"reencode": 90}, {"shard_bytes": 30_000}):
        with pytest.raises(UserError, match="other options"):
            packed(root, out, **change)
    with pytest.raises(UserError, match="other pictures"):
        packed(other, out)
    assert before is None or files(out) == before


def test_a_folder_in_other_use_is_refused(root, tmp_path):
    put(tmp_path / "out" / "letter.txt", b"dear")
    with pytest.raises(UserError, match=r"not empty \(letter.txt is in it\).*--out"):
        packed(root, tmp_path / "out")
    with pytest.raises(UserError, match="not empty"):
        packed(root, root)


def test_two_at_once_are_refused(root, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError):
        packed(root, out, max_broken=0)
    with open(out / ".packing" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another pack is at work"):
            packed(root, out)
    packed(root, out)


def test_a_pack_that_waited_for_the_lock_sees_that_all_is_done(root, tmp_path, monkeypatch, capsys):
    """The other one ends between the opening of the lock's file and the locking."""
    flock, out = fcntl.flock, tmp_path / "out"

    def late(*arguments):
        monkeypatch.setattr(fcntl, "flock", flock)
        packed(root, out)
        before.update(files(out))
        flock(*arguments)

    before: dict[str, bytes] = {}
    monkeypatch.setattr(fcntl, "flock", late)
    packed(root, out)
    assert files(out) == before
    assert "is packed already" in capsys.readouterr().out


def test_one_pack_does_not_write_into_the_file_of_another(root, tmp_path, monkeypatch):
    out, parts = tmp_path / "out", tmp_path / "parts"
    parts.mkdir(), out.mkdir()
    task, train, here = Task("train", 0, 0, 3, 5000), opened(root).train, os.getpid()

    def another(_):
        if os.getpid() == here:
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(os, "getpid", lambda: here + 1)
                write(task, train, How(), out, parts, another)
        assert os.getpid() != here or written(task, out, parts) is not None

    write(task, train, How(), out, parts, another)
    assert written(task, out, parts) is not None


def test_two_at_once_go_well_where_nothing_can_be_locked(larger, unbroken, tmp_path):
    """Some network file systems have no locks."""
    program = (
        "import fcntl, sys, errno\n"
        "def flock(*_): raise OSError(errno.ENOLCK, 'No locks available')\n"
        "fcntl.flock = flock\n"
        "from worldsize import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", program, *map(str, command(larger, tmp_path / "out"))]
    both = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [running.communicate(timeout=60)[1] for running in both]
    assert [text.count("cannot be locked (No locks available)") for text in told] == [1, 1]
    assert 0 in [running.returncode for running in both]
    # The slower one may have begun a file while the faster one cleared away.
    shutil.rmtree(tmp_path / "out" / ".packing", ignore_errors=True)
    assert files(tmp_path / "out") == unbroken


def test_a_shard_that_is_removed_meanwhile_is_missed(root, tmp_path, monkeypatch):
    out, written = tmp_path / "out", pack_module._write

    def removes_one(*arguments):
        written(*arguments)
        (out / "train-00001.tar").unlink()

    monkeypatch.setattr(pack_module, "_write", removes_one)
    with pytest.raises(DataError, match=r"train-00001\.tar was removed.*again"):
        packed(root, out)
    monkeypatch.undo()
    packed(root, out)


def test_what_a_killed_pack_was_writing_is_removed_before_room_is_looked_for(root, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(DataError):
        packed(root, out, max_broken=0)
    (out / "train-00000.tar").unlink()
    left = put(out / ".packing" / "train-00000.tar.elsewhere.1.tmp", bytes(1000))
    room = shutil.disk_usage(out)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room if not left.exists() else room._replace(free=0))
    packed(root, out)


def test_a_disk_that_is_too_small_is_refused_at_once(root, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match=r"has 1\.0 kB free, but .* are needed"):
        packed(root, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tar"))


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    root = two_classes(tmp_path / "root")
    (root / "train" / "cat" / "gone.jpg").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"gone\.jpg cannot be read: No such file.*mend or remove"):
        packed(root, tmp_path / "out")


def test_a_picture_that_becomes_unreadable_meanwhile_is_named_and_mended(tmp_path, monkeypatch):
    root, out = two_classes(tmp_path / "root"), tmp_path / "out"
    dataset, picture = opened(root), root / "train" / "cat" / "1.png"

    def removed(*_):
        picture.rename(tmp_path / "away")
        return shutil._ntuple_diskusage(10**9, 0, 10**9)

    monkeypatch.setattr(shutil, "disk_usage", removed)
    with pytest.raises(UserError, match=r"1\.png cannot be read.*another --out"):
        pack(dataset, out, How(), 20_000, 2, 0)
    monkeypatch.undo()
    (tmp_path / "away").rename(picture)
    packed(root, out)


def test_a_picture_that_cannot_be_encoded_is_named(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("encoder error -2 when writing image file")

    root = two_classes(tmp_path / "root")
    monkeypatch.setattr(Image.Image, "save", fails)
    with pytest.raises(UserError, match=r"[1-5]\.png cannot be encoded \(encoder error -2"):
        packed(root, tmp_path / "out", reencode=90)


# Broken pictures ---------------------------------------------------------------------------------------------------


def test_too_many_broken_pictures_are_refused_and_a_larger_share_goes_on(root, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"4 of 27 pictures are broken.*--max-broken"):
        packed(root, out, max_broken=0.1)
    assert not (out / "index.json").exists()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    packed(root, out, max_broken=0.15)
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")} == before


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_broken_pictures_are_kept_as_they_are_and_listed(root, tmp_path, capsys, how):
    samples = packed(root, tmp_path / "out", **how).train
    out = capsys.readouterr().out
    before = opened(root).train
    for i in range(len(before)):
        if before.path(i).split("/")[1] in BROKEN:
            assert samples.records["kind"][i] == Kind.BROKEN
            assert bytes(samples.encoded(i)) == before.encoded(i)
            assert f"{samples.name(i)}: " in out
        else:
            assert samples.records["kind"][i] != Kind.BROKEN


# Made smaller ------------------------------------------------------------------------------------------------------


def opened_bytes(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(
    ("size", "expected"), [((1000, 600), (500, 300)), ((333, 1000), (166, 500)), ((500, 400), (500, 400))]
)
def test_the_longer_side_is_made_smaller_and_never_larger(size, expected):
    stored = store(encode(noise(*size), "JPEG", quality=98, subsampling=0), How(reencode=90, max_side=500))
    assert (stored.width, stored.height) == opened_bytes(stored.data).size == expected
    assert stored.kind == Kind.JPEG


def test_a_reencoded_picture_is_pillows_jpeg_of_the_resized_picture():
    original = encode(noise(800, 600), "PNG")
    stored = store(original, How(reencode=77, max_side=400))
    smaller = decode(original).resize((400, 300), Image.Resampling.BILINEAR)
    assert stored.data == encode(smaller, "JPEG", quality=77, subsampling=2)
    assert stored.extension == "jpg"


def test_a_jpeg_that_would_become_longer_stays():
    small = encode(noise(80, 60), "JPEG", quality=40)
    assert store(small, How(reencode=95, max_side=500)).data == small
    large = encode(noise(80, 60), "JPEG", quality=100, subsampling=0)
    assert len(store(large, How(reencode=50)).data) < len(large)


@pytest.mark.parametrize(
    "original",
    [encode(noise(80, 60), "JPEG", quality=40, progressive=True), encode(noise(80, 60, 0, "CMYK"), "JPEG", quality=40)],
    ids=["progressive", "cmyk"],
)
def test_slow_jpegs_are_made_plain_ones_even_if_longer(original):
    stored = store(original, How(reencode=95))
    picture = opened_bytes(stored.data)
    assert (picture.mode, "progressive" in picture.info, stored.components) == ("RGB", False, 3)


def test_a_picture_longer_than_a_jpeg_can_be_stays():
    ribbon = encode(noise(70_000, 10), "PNG")
    assert store(ribbon, How(reencode=90)).data == ribbon
    assert store(ribbon, How(reencode=90, max_side=65_500)).width == 65_500


def test_grey_stays_grey():
    stored = store(encode(noise(300, 200, 0, "L"), "JPEG", quality=100), How(reencode=50))
    assert (opened_bytes(stored.data).mode, stored.components) == ("L", 1)


@pytest.mark.parametrize("size", [(400, 300), (100, 300), (64, 64), (20, 30)])
def test_raw_pixels_are_the_middle_of_the_resized_picture(size):
    original = encode(noise(*size), "PNG")
    stored = store(original, How(raw=64))
    assert (stored.kind, stored.extension, stored.width, stored.height) == (Kind.RAW, "ppm", 64, 64)
    np.testing.assert_array_equal(np.asarray(opened_bytes(stored.data)), fit(decode(original), 64, 64))


def test_raw_samples_are_read_without_decoding(root, tmp_path):
    samples = packed(root, tmp_path / "out", raw=24).train
    raw = [i for i in range(len(samples)) if samples.records["kind"][i] == Kind.RAW]
    assert len(raw) == len(samples) - len(BROKEN)
    for i in raw:
        pixels = samples.stored(i)
        assert pixels.shape == (24, 24, 3)
        assert not pixels.flags.writeable
        np.testing.assert_array_equal(np.asarray(samples.picture(i)), pixels)
        np.testing.assert_array_equal(np.asarray(decode(bytes(samples.encoded(i)))), pixels)


def test_a_picture_too_thin_to_resize_is_broken(tmp_path):
    thread = encode(Image.new("L", (50_000, 1)), "PNG")
    assert store(thread, How(raw=256)).kind == Kind.BROKEN
    assert store(thread, How()).kind == Kind.PNG


def test_a_picture_too_thin_to_resize_is_listed_with_its_reason(tmp_path, capsys):
    root = two_classes(tmp_path / "root")
    put(root / "train" / "cat" / "thread.png", encode(Image.new("L", (50_000, 1)), "PNG"))
    packed(root, tmp_path / "out", raw=256)
    assert re.search(r"broken +1, kept as they are:\n.*thread\.png: .*\w", capsys.readouterr().out)


def test_pictures_in_memory_are_stored_raw(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    labels = (permute(0, 0, np.arange(30), 30) % 3).astype(np.int32)
    samples = ArraySamples("three", pixels, labels, ("a", "b.c", "d"))
    pack(Dataset(samples, samples), tmp_path / "out", How(), 20_000, 2, 0)
    train = shards.open_dataset(tmp_path / "out").train
    assert train.labels.tolist() == labels.tolist()
    for i in range(30):
        np.testing.assert_array_equal(train.stored(i), pixels[i])
    assert train.path(7) == f"{samples.classes[labels[7]]}/0000007"


def test_a_run_on_smaller_pictures_is_another_run(root, tmp_path):
    prints = {packed(root, tmp_path / str(i), **how).train.fingerprint for i, how in enumerate(OPTIONS)}
    assert len(prints) == len(OPTIONS)


# The command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--reencode", "90", "--raw", "256"], "exclude each other"),
        (["--max-side", "500"], "--max-side needs --reencode"),
        (["--reencode", "0"], "1 to 100"),
        (["--reencode", "90", "--max-side", "0"], "65,500"),
        (["--raw", "1"], "4,096"),
        (["--shard-mb", "0"], "--shard-mb 0"),
        (["--workers", "0"], "--workers 0: at least 1"),
        (["--root", "gone"], "--data.root gone: there is no such folder"),
    ],
)
def test_what_cannot_be_is_refused(fails, tmp_path, options, expected):
    two_classes(tmp_path / "root")
    assert expected in fails("data", "pack", "--root", "root", "--out", "out", *options)
    assert not list(tmp_path.glob("out/*.tar"))


def test_too_many_broken_ones_end_with_65(fails, root):
    assert "are broken" in fails("data", "pack", "--root", root, "--out", "out", code=65)


@pytest.mark.slow
def test_real_pictures_and_a_run_on_them(shared, tmp_path):
    """Training on shards gives the very weights of training on the originals."""
    root = shared / "imagenet-mini"
    if not root.is_dir():
        pytest.skip(f"{root} is absent")
    assert worldsize("data", "pack", "--root", root, "--out", "shards", "--shard-mb", "20", cwd=tmp_path).returncode == 0
    samples, before = shards.open_dataset(tmp_path / "shards").train, opened(root, "imagenet", tmp_path / "cache").train
    for i in range(len(before)):
        assert bytes(samples.encoded(i)) == before.encoded(i)
        with pytest.raises(BrokenPicture) if samples.records["kind"][i] == Kind.BROKEN else np.errstate():
            assert samples.picture(i).size[::-1] == tuple(samples.sizes(np.array([i]))[0])


def test_a_run_on_shards_gives_the_weights_of_one_on_the_originals(ranks, larger):
    """And one that began on the originals goes on on the shards."""
    packed(larger, ranks.cwd / "shards", shard_bytes=300_000)
    settings = ["--data.name", "folder", "--model.name", "shufflenet_v2_x0_5", "--data.train-crop", "random_resized"]
    settings += ["--epochs", "1", "--global-batch", "12", "--micro-batch", "6", "--deterministic"]
    settings += ["--schedule.warmup-epochs", "0", "--precision", "fp32"]

    def train(name: str, root: Path, *options: str) -> Path:
        ranks(1).run("train", "digits", *settings, "--name", name, "--data.root", root, *options)
        return ranks.cwd / "runs" / name

    originals = train("originals", larger)
    assert identical(weights(train("shards", ranks.cwd / "shards")), weights(originals))
    begun = train("begun", larger, "--max-steps", "2")
    ranks(1).run("train", "--resume", begun, "--data.root", ranks.cwd / "shards", "--max-steps", "5")
    assert identical(weights(begun), weights(originals))
