"""After a loss of power, a run continues from its newest checkpoint, with the record of every step before it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from interruptions import start_until
from paths import SMALL_NETWORK
from processes import records, worldsize
from waiting import until
from worldsize import cli

QUICK = (
    *("--data.name", "synthetic", "--data.samples", "32", "--data.classes", "4", "--model.name", SMALL_NETWORK),
    *("--data.train-crop-size", "32", "--data.val-crop-size", "32", "--global-batch", "16", "--micro-batch", "8"),
    *("--epochs", "2", "--schedule.warmup-epochs", "0", "--max-steps", "3", "--checkpoint.every-steps", "2"),
)


def test_the_record_is_on_the_disk_before_the_checkpoint_counts(tmp_path, monkeypatch):
    durable: dict[str, int] = {}  # size in bytes when it was last flushed
    fsync, rename = os.fsync, Path.rename

    def flushing(descriptor: int) -> None:
        fsync(descriptor)
        durable[str(Path(f"/proc/self/fd/{descriptor}").readlink())] = os.fstat(descriptor).st_size

    def published(self: Path, target: Path) -> Path:
        if target.name == "step-00000002":
            run = target.parents[1]
            written = (run / "metrics.jsonl").read_text()
            assert written.count('"kind": "step"') == 2
            assert durable[str(run / "metrics.jsonl")] == len(written)
            assert all(durable.get(str(path)) for path in (run / "recipe.yaml", run / "environment.json", run))
            seen.append(target)
        return rename(self, target)

    seen: list[Path] = []
    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(Path, "rename", published)
    assert cli.main(["train", "digits", *QUICK, "--out", str(tmp_path / "runs"), "--name", "a"]) == 0
    assert seen


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """The folder of an own file system, ext4 in a file."""
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(200 << 20)
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("making a file system needs root and mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False).returncode:
        pytest.skip("a file cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def lose_power(disk: Path) -> None:
    """What was not flushed is lost: nothing more reaches the disk, and its file system is repaired as when booting."""
    subprocess.run(["umount", disk], check=True)
    image = disk.with_suffix(".img")
    assert subprocess.run(["e2fsck", "-fp", image], check=False, stdout=subprocess.DEVNULL).returncode in (0, 1)
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("procs", [1, 2])
def test_a_run_continues_after_a_loss_of_power(disk, procs):
    process = start_until(disk, "a", procs, 6, "--checkpoint.every-steps", "4")
    run = disk / "runs" / "a"
    until(lambda: (run / "checkpoints" / "step-00000004").exists(), "there is a checkpoint", running=process)
    subprocess.run(["mount", "-o", "remount,abort", disk], check=True)
    process.kill()
    process.communicate()
    lose_power(disk)
    done = worldsize("train", "--resume", run, "--stop-after", "8", cwd=disk)
    assert done.returncode == 75, done.stderr
    assert [record["step"] for record in records(run, "step")] == [*range(1, 9)]
