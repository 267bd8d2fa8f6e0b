"""`worldsize data pack`: the same bytes after any interruption, and folders and disks that it refuses."""

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

from packing import SPECIAL, encode, files, noise, packed, special_files
from processes import start_python, worldsize
from trees import opened, put, two_classes
from worldsize.data import shards
from worldsize.data.shards import pack as pack_module
from worldsize.data.shards.images import How
from worldsize.data.shards.pack import pack
from worldsize.data.shards.write import Task, plan, write, written
from worldsize.errors import DataError, UserError


def command(root: Path, out: Path) -> list[str | Path]:
    return ["data", "pack", "--root", root, "--out", out, "--shard-mb", "0.3", "--workers", "2"]


@pytest.fixture(scope="module")
def unbroken(larger, tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    done = worldsize(*command(larger, out), cwd=out.parent)
    assert done.returncode == 0, done.stderr
    assert "50 images" not in done.stdout
    return files(out)


def interrupted(larger: Path, out: Path, number: int, after: int, delay: float = 0) -> int:
    """Send a signal ``delay`` seconds after there are ``after`` shards; gives the exit code."""
    running = start_python(*command(larger, out), cwd=out.parent)
    deadline = time.monotonic() + 60
    while running.poll() is None and time.monotonic() < deadline:
        if out.is_dir() and len(list(out.glob("*.tar"))) >= after:
            time.sleep(delay)
            running.send_signal(number)
            break
        time.sleep(0.001)
    running.communicate(timeout=240)
    return running.returncode


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_resumes_to_the_same_bytes(larger, unbroken, tmp_path, seed):
    draw = random.Random(seed)
    out = tmp_path / "out"
    kills = 0
    for after in sorted(draw.sample(range(len(unbroken) - 4), 3)):
        code = interrupted(larger, out, signal.SIGKILL, after, draw.random() / 10)
        kills += code == -signal.SIGKILL
        if not (out / "index.json").exists() and list(out.glob("*.tar")):
            with pytest.raises(UserError, match="until it completes"):
                shards.open_dataset(out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    done = worldsize(*command(larger, out), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert kills >= 1
    assert files(out) == unbroken
    assert all((out / name).stat().st_mtime_ns == at for name, at in before.items()), "complete shards were written again"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_complete_shards(larger, unbroken, tmp_path, monkeypatch, number):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    out = tmp_path / "out"
    assert interrupted(larger, out, number, 2) == 75
    assert not list(temporary.glob("worldsize-*"))
    assert len(list(out.glob("*.tar"))) >= 2
    done = worldsize(*command(larger, out), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert files(out) == unbroken


@pytest.mark.parametrize(
    "damage", ["part lost", "part truncated", "part changed", "tar of another", "tar truncated", "tar lost"]
)
def test_incomplete_results_are_written_again(root, tmp_path, monkeypatch, damage):
    """As after a crash of the machine."""
    packed(root, tmp_path / "unbroken")
    out = tmp_path / "out"
    with pytest.raises(DataError):
        packed(root, out, max_broken=0)
    part = out / ".packing" / "train-00001.tar.index"
    match damage:
        case "part lost":
            part.unlink()
        case "part truncated":
            part.write_bytes(part.read_bytes()[:-8])
        case "part changed":
            part.write_bytes(bytes(len(part.read_bytes())))
        case "tar of another":
            shutil.copy(out / "train-00000.tar", out / "train-00001.tar")
        case "tar truncated":
            os.truncate(out / "train-00001.tar", 5000)
        case "tar lost":
            (out / "train-00001.tar").unlink()
    packed(root, out)
    assert files(out) == files(tmp_path / "unbroken")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_plan_is_refused(root, tmp_path, damage):
    out = tmp_path / "out"
    put(out / ".packing" / "plan.json", damage)
    with pytest.raises(DataError, match=r"plan\.json is damaged: remove .*--out"):
        packed(root, out)


def test_shards_of_another_plan_are_refused(root, tmp_path, monkeypatch):
    """As by a version that computes other shard boundaries."""
    out = tmp_path / "out"
    with pytest.raises(DataError):
        packed(root, out, max_broken=0)
    monkeypatch.setattr(pack_module, "plan", lambda split, *others: plan(split, *others[:-1], others[-1] + 5000))
    with pytest.raises(UserError, match="other options"):
        packed(root, out)


def test_a_part_of_the_index_for_other_samples_is_not_used(root, tmp_path):
    out, parts = tmp_path / "out", tmp_path / "parts"
    parts.mkdir(), out.mkdir()
    task = Task("train", 0, 0, 3, 5000)
    write(task, opened(root).train, How(), out, parts, lambda _: None)
    assert written(task, out, parts) is not None
    assert written(replace(task, stop=4), out, parts) is None


def test_a_second_run_changes_nothing(root, tmp_path, capsys):
    out = tmp_path / "out"
    packed(root, out)
    # The folder's own time would reveal a temporary file.
    before = {path.name: path.stat().st_mtime_ns for path in (out, *out.iterdir())}
    packed(root, out)
    assert {path.name: path.stat().st_mtime_ns for path in (out, *out.iterdir())} == before
    assert "is already packed" in capsys.readouterr().out


@pytest.mark.parametrize("complete", [True, False])
def test_other_options_and_other_images_are_refused(root, tmp_path, complete):
    out = tmp_path / "out"
    if complete:
        packed(root, out)
    else:
        with pytest.raises(DataError):
            packed(root, out, max_broken=0)
    before = files(out) if complete else None
    other = shutil.copytree(root, tmp_path / "other")
    put(other / "train" / "plain" / "0.jpg", encode(noise(90, 90, 77), "JPEG"))
    for change in ({"raw": 24}, {"reencode": 90}, {"shard_bytes": 30_000}):
        with pytest.raises(UserError, match="other options"):
            packed(root, out, **change)
    with pytest.raises(UserError, match="other images"):
        packed(other, out)
    assert before is None or files(out) == before


def test_a_folder_with_other_files_is_refused(root, tmp_path):
    put(tmp_path / "out" / "letter.txt", b"dear")
    with pytest.raises(UserError, match=r"not empty \(it contains letter.txt\).*--out"):
        packed(root, tmp_path / "out")
    with pytest.raises(UserError, match="not empty"):
        packed(root, root)


def test_two_at_once_are_refused(root, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError):
        packed(root, out, max_broken=0)
    with open(out / ".packing" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another pack is already running"):
            packed(root, out)
    packed(root, out)


def test_a_pack_that_gets_the_lock_late_finds_the_complete_dataset(root, tmp_path, monkeypatch, capsys):
    """The other pack completes between opening and locking the lock file."""
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
    assert "is already packed" in capsys.readouterr().out


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


def test_two_at_once_succeed_without_locks(larger, unbroken, tmp_path):
    """Some network file systems do not support locks."""
    ready = tmp_path / "ready"
    ready.mkdir()
    program = (
        "import errno, fcntl, os, sys, time\n"
        "def flock(*_):\n"
        f"    open(f'{ready}/{{os.getpid()}}', 'w').close()\n"
        f"    while len(os.listdir('{ready}')) < 2: time.sleep(0.01)\n"  # neither finishes before the other begins
        "    raise OSError(errno.ENOLCK, 'No locks available')\n"
        "fcntl.flock = flock\n"
        "from worldsize import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", program, *map(str, command(larger, tmp_path / "out"))]
    both = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [running.communicate(timeout=240)[1] for running in both]
    assert [text.count("cannot be locked (No locks available)") for text in outputs] == [1, 1]
    assert 0 in [running.returncode for running in both]
    # The slower one may create a file while the faster one removes the folder.
    shutil.rmtree(tmp_path / "out" / ".packing", ignore_errors=True)
    assert files(tmp_path / "out") == unbroken


def test_a_shard_removed_during_the_pack_is_reported(root, tmp_path, monkeypatch):
    out, written = tmp_path / "out", pack_module._write

    def removes_one(*arguments):
        written(*arguments)
        (out / "train-00001.tar").unlink()

    monkeypatch.setattr(pack_module, "_write", removes_one)
    with pytest.raises(DataError, match=r"train-00001\.tar was removed.*rerun"):
        packed(root, out)
    monkeypatch.undo()
    packed(root, out)


def test_temporary_files_of_a_killed_pack_are_removed_before_the_disk_space_check(root, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(DataError):
        packed(root, out, max_broken=0)
    (out / "train-00000.tar").unlink()
    stale = put(out / ".packing" / "train-00000.tar.elsewhere.1.tmp", bytes(1000))
    usage = shutil.disk_usage(out)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if not stale.exists() else usage._replace(free=0))
    packed(root, out)


def test_a_disk_that_is_too_small_is_refused_at_once(root, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match=r"has 1\.0 kB free, but .* are needed"):
        packed(root, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tar"))


def test_what_is_not_a_regular_file_is_packed_as_a_broken_image_without_bytes(tmp_path, capsys):
    root, out = two_classes(tmp_path / "root"), tmp_path / "out"
    with special_files(root / "train" / "cat"):
        with pytest.raises(DataError, match="5 of 8 training images are broken"):
            packed(root, out, max_broken=0.4)
        samples = packed(root, out, max_broken=0.7).train
        listed = capsys.readouterr().out
        packed(root, out)
    assert "is already packed" in capsys.readouterr().out
    assert [samples.path(i) for i in range(len(samples))] == [opened(root).train.path(i) for i in range(len(samples))]
    for i in range(len(samples)):
        name = samples.path(i).rsplit("/", 1)[1]
        assert (samples.length(i) == 0) == (name in SPECIAL)
        assert name not in SPECIAL or f"{samples.name(i)}: {SPECIAL[name]}\n" in listed


def test_a_link_that_becomes_dangling_meanwhile_is_named(tmp_path):
    root, image = two_classes(tmp_path / "root"), tmp_path / "elsewhere.png"
    (root / "train" / "cat" / "1.png").rename(image)
    (root / "train" / "cat" / "1.png").symlink_to(image)
    dataset = opened(root)
    image.unlink()
    with pytest.raises(UserError, match=r"1\.png is a dangling symbolic link.*another --out"):
        write(Task("train", 0, 0, 3, 5000), dataset.train, How(), tmp_path, tmp_path, lambda _: None)


def test_an_image_that_cannot_be_looked_up_is_named(tmp_path):
    root = two_classes(tmp_path / "root")
    dataset = opened(root)
    (root / "train" / "cat" / "1.png").unlink()
    with pytest.raises(UserError, match=r"1\.png cannot be read: No such file.*fix or remove"):
        pack(dataset, tmp_path / "out", How(), 20_000, 2, 0)


def test_an_image_that_becomes_unreadable_is_named_and_can_be_restored(tmp_path, monkeypatch):
    root, out = two_classes(tmp_path / "root"), tmp_path / "out"
    dataset, image = opened(root), root / "train" / "cat" / "1.png"

    def removed(*_):
        image.rename(tmp_path / "away")
        return shutil._ntuple_diskusage(10**9, 0, 10**9)

    monkeypatch.setattr(shutil, "disk_usage", removed)
    with pytest.raises(UserError, match=r"1\.png cannot be read.*another --out"):
        pack(dataset, out, How(), 20_000, 2, 0)
    monkeypatch.undo()
    (tmp_path / "away").rename(image)
    packed(root, out)


def test_an_image_that_cannot_be_encoded_is_named(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("encoder error -2 when writing image file")

    root = two_classes(tmp_path / "root")
    monkeypatch.setattr(Image.Image, "save", fails)
    with pytest.raises(UserError, match=r"[1-5]\.png cannot be encoded \(encoder error -2"):
        packed(root, tmp_path / "out", reencode=90)
