"""The control groups (cgroups) of this process, by which containers, systemd and Slurm limit what it may use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """Where the limits and the statistics of ``controller`` (cpu, memory) may be, with the innermost cgroup first.

    The cgroups of this process and those that contain them, of version 2 and 1. In a container their path is often
    hidden, and ``root`` is the container's own.
    """
    found: list[Path] = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mounts = [root] if not controllers else [root / name for name in (controller, controllers)]
            if not controllers or controller in controllers.split(","):
                found += [inner for mount in mounts for inner in _up_to(mount, path)]
    return list(dict.fromkeys([*found, root, root / controller]))


def _up_to(mount: Path, path: str) -> list[Path]:
    parts = Path(path.lstrip("/")).parts
    return [mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)] if ".." not in parts else []
