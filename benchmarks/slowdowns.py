"""One process of a run that is made slow on purpose: ``python slowdowns.py [SLOWDOWN=VALUE ...] -- train ...``.

The slowdowns: ``reads``, ``decoding`` and ``trackers`` sleep VALUE seconds in each call; ``quota`` moves the process into a
cgroup of its own with VALUE processors; ``disk`` into one that reads VALUE bytes/s from the disk that holds the images;
``cpu`` binds it to a processor.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from worldsize import cli
from worldsize.data.loading.prepare import Preparation
from worldsize.data.samples import EncodedSamples
from worldsize.track import jsonl

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


def _delayed(kind: type, method: str, seconds: float) -> None:
    """Make a method sleep first."""
    original: Callable = getattr(kind, method)

    def later(*arguments, **named):  # type: ignore[no-untyped-def]
        time.sleep(seconds)
        return original(*arguments, **named)

    setattr(kind, method, later)


def reads(value: str) -> None:
    _delayed(EncodedSamples, "several", float(value))


def decoding(value: str) -> None:
    _delayed(Preparation, "fill", float(value))


def trackers(value: str) -> None:
    _delayed(jsonl.Tracker, "steps", float(value))


def quota(value: str) -> None:
    if (CGROUPS / "cgroup.controllers").exists():
        _enter(CGROUPS, {"cpu.max": f"{round(float(value) * PERIOD_US)} {PERIOD_US}"})
    else:
        _enter(
            CGROUPS / "cpu", {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": f"{round(float(value) * PERIOD_US)}"}
        )


def disk(value: str) -> None:
    rate, folder = value.split("@")
    device = os.stat(folder).st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {rate}"
    if (CGROUPS / "cgroup.controllers").exists():
        _enter(CGROUPS, {"io.max": limit.replace(" ", " rbps=")})
    else:
        _enter(CGROUPS / "blkio", {"blkio.throttle.read_bps_device": limit})


def cpu(value: str) -> None:
    os.sched_setaffinity(0, {int(value)})


def _enter(root: Path, settings: dict[str, str]) -> None:
    """Move this process into a new cgroup with these settings. The caller of the process removes it."""
    group = root / f"worldsize-{os.getpid()}"
    group.mkdir()
    for name, value in settings.items():
        (group / name).write_text(value)
    (group / "cgroup.procs").write_text(str(os.getpid()))


if __name__ == "__main__":
    at = sys.argv.index("--")
    for word in sys.argv[1:at]:
        name, _, value = word.partition("=")
        {"reads": reads, "decoding": decoding, "trackers": trackers, "quota": quota, "disk": disk, "cpu": cpu}[name](value)
    sys.exit(cli.main(sys.argv[at + 1 :]))
