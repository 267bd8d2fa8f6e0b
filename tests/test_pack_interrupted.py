"""`worldsize data pack`: the same bytes whatever interrupts it, and folders and disks that it refuses."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from packing import encode, files, noise, packed
from processes import start, worldsize
from trees import opened, put, two_classes
from worldsize.data import shards
from worldsize.data.shards import pack as pack_module
from worldsize.data.shards.pack import pack
from worldsize.data.shards.pictures import How
from worldsize.data.shards.write import Task, plan, write, written
from worldsize.errors import DataError, UserError


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
    out = tmp_path / "out"
    packed(root, out)
    # The folder's own time would tell of a file that came and went.
    before = {path.name: path.stat().st_mtime_ns for path in (out, *out.iterdir())}
    packed(root, out)
    assert {path.name: path.stat().st_mtime_ns for path in (out, *out.iterdir())} == before
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
