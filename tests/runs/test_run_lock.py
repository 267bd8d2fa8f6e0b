"""Two processes never train one run: the second is refused and changes nothing; a dead one does not block the run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paths import SMALL_NETWORK
from processes import losses, start
from worldsize import cli
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import RunInUse, UserError
from worldsize.runs import run_lock

QUICK = (
    *("--data.name", "synthetic", "--data.samples", "32", "--data.classes", "4", "--model.name", SMALL_NETWORK),
    *("--data.train-crop-size", "32", "--data.val-crop-size", "32", "--global-batch", "16", "--micro-batch", "8"),
    *("--schedule.warmup-epochs", "0", "--evaluate-every", "100", "--track.every-seconds", "0"),
)
# Holds the lock until its input ends.
HOLDER = """
import sys
from pathlib import Path
from worldsize.runs import run_lock
run_lock.BEAT_S = 0.05
if "no-locks" in sys.argv:
    run_lock._lock = lambda file: False
with run_lock.RunLock() as lock:
    lock.acquire(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """hold(path, *options) starts another process that holds the lock."""
    started = []

    def begin(path: Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(path), *options]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def acquire(path: Path, wait: bool = False) -> run_lock.RunLock:
    """Lock, and release again."""
    with run_lock.RunLock() as lock:
        lock.acquire(path, wait)
    return lock


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def elsewhere(monkeypatch) -> None:
    """This process is on another host than the others, and the file system's locks do not reach it."""
    monkeypatch.setattr(run_lock, "_machine", lambda: "another host")
    monkeypatch.setattr(run_lock, "_lock", lambda _: True)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that has begun."""
    folder = tmp_path / "some" / "a"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe_files.to_yaml(Recipe()))
    (folder / "history.jsonl").write_text(json.dumps({"event": "started", "step": 0}) + "\n")
    return folder


def stats(pid: int) -> list[Path]:
    """The files with the state of each thread."""
    return [*Path(f"/proc/{pid}/task").glob("*/stat")]


def content(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("options", [(), ("no-locks",)])
def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path, hold, monkeypatch, options):
    if options:
        monkeypatch.setattr(run_lock, "_lock", lambda _: False)
    path = tmp_path / "lock"
    for end in (kill, lambda process: process.communicate("")):
        process = hold(path, *options)
        with pytest.raises(UserError, match=rf"trained by process {process.pid} on {socket.gethostname()}, since 20\d\d-"):
            acquire(path)
        end(process)
        acquire(path)
        assert path.read_text() == ""


@pytest.mark.parametrize("options", [(), ("no-locks",)])
def test_a_process_on_another_host_is_seen_by_its_record(tmp_path, hold, monkeypatch, options):
    path = tmp_path / "lock"
    process = hold(path, *options)
    elsewhere(monkeypatch)
    monkeypatch.setattr(run_lock, "SILENCE_S", 600.0)
    with pytest.raises(UserError, match=rf"process {process.pid} on .*gone for good, delete {path}"):
        acquire(path)
    kill(process)
    monkeypatch.setattr(run_lock, "SILENCE_S", 0.5)
    acquire(path)


def test_a_process_in_another_container_is_seen_by_its_record(tmp_path, hold, monkeypatch):
    path = tmp_path / "lock"
    process = hold(path, "no-locks")
    monkeypatch.setattr(run_lock, "_lock", lambda _: False)
    monkeypatch.setattr(run_lock, "_space", lambda: "another container")
    with pytest.raises(UserError, match=f"process {process.pid} on"):
        acquire(path)
    kill(process)
    monkeypatch.setattr(run_lock, "SILENCE_S", 0.5)
    acquire(path)


def test_of_two_that_start_together_without_locks_one_continues(tmp_path, monkeypatch):
    path, write = tmp_path / "lock", run_lock._write
    monkeypatch.setattr(run_lock, "_lock", lambda _: False)

    def written_by_both(file: int, holder: run_lock.Holder) -> None:
        write(file, holder)
        other = run_lock.Holder("h2", 7, time.time(), "m2", "", "", "the other's")
        path.write_bytes(json.dumps(vars(other)).encode())

    monkeypatch.setattr(run_lock, "_write", written_by_both)
    with pytest.raises(UserError, match="process 7 on h2"):
        acquire(path)


def test_a_restart_waits_for_its_predecessor(tmp_path, hold, monkeypatch):
    path = tmp_path / "lock"
    process = hold(path)
    polls = []

    def sleep(_: float) -> None:
        polls.append(process.communicate("") if not polls else None)

    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    acquire(path, wait=True)
    assert polls
    process = hold(path)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.0)
    with pytest.raises(RunInUse, match=f"process {process.pid}"):
        acquire(path, wait=True)


def test_a_damaged_record_blocks_nothing(tmp_path):
    for damaged in (b"", b"{", b"[]", b"\xff" * 2000, b'{"host": 1}'):
        (tmp_path / "lock").write_bytes(damaged)
        acquire(tmp_path / "lock")


def test_a_run_on_read_only_storage_can_still_be_opened(tmp_path, monkeypatch):
    def refused(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refused)
    acquire(tmp_path / "lock")


def test_resume_of_a_run_that_is_trained_is_refused_and_changes_nothing(run, hold, fails, monkeypatch):
    process, before = hold(run / "lock"), content(run)
    assert f"{run} is being trained by process {process.pid} on" in fails("train", "--resume", run)
    assert content(run) == before
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.0)
    again = ("train", "digits", *QUICK, "--out", run.parent, "--name", "a", "--autoresume")
    assert f"process {process.pid}" in fails(*again, code=69)
    assert content(run) == before


def test_a_full_disk_is_named_and_a_new_run_does_not_keep_its_name(run, fails, monkeypatch, tmp_path):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_lock, "_write", full)
    assert fails("train", "--resume", run).endswith(f"worldsize: {run}/lock: No space left on device\n")
    for words in ((), ("--autoresume",)):
        message = fails("train", "digits", *QUICK, "--out", tmp_path / "out", "--name", "b", *words)
        assert message.endswith(f"worldsize: {tmp_path}/out/b/lock: No space left on device\n")
        assert not (tmp_path / "out" / "b").exists()


def test_a_run_that_is_trained_is_refused_by_all_ranks(ranks, hold):
    two = ranks(2)
    two.run("train", "digits", *QUICK, "--epochs", "4", "--name", "shared", "--stop-after", "2", code=75)
    process = hold(ranks.cwd / "runs" / "shared" / "lock")
    output = two.run("train", "--resume", "runs/shared", code=64)
    assert output.count(f"is being trained by process {process.pid}") == 1
    kill(process)
    two.run("train", "--resume", "runs/shared")
    assert len(losses(ranks.cwd / "runs" / "shared")) == 8


def test_after_kill_9_the_run_resumes(tmp_path, fails):
    words = ("--epochs", "2000", "--checkpoint.every-steps", "5")
    process = start("train", "digits", *QUICK, *words, "--name", "a", "--out", "some", cwd=tmp_path)
    folder = tmp_path / "some" / "a"
    deadline = time.monotonic() + 240
    while not [*folder.glob("checkpoints/step-????????/manifest.json")]:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)  # so that it changes nothing, either
    while not all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats(process.pid)):
        assert time.monotonic() < deadline
    before = content(folder)
    assert f"process {process.pid} on" in fails("train", "--resume", folder)
    assert content(folder) == before
    process.kill()
    process.communicate()
    assert cli.main(["train", "--resume", str(folder), "--stop-after", str(len(losses(folder)) + 2)]) == 75
