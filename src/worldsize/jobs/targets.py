"""The values of ``--on`` and the schedulers behind them. A new one is a package and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from worldsize.errors import UserError, did_you_mean
from worldsize.jobs.base import Scheduler, Where

# Each value of --on has a module with the functions `train_on(argv)` (but `local`) and `render(argv)`, which return an exit
# code.
TARGETS = {
    "local": "worldsize.jobs.local",
    "pytorchjob": "worldsize.cluster.commands",
    "mpijob": "worldsize.cluster.commands",
    "trainjob": "worldsize.cluster.commands",
    "slurm": "worldsize.slurm.commands",
    "ssh": "worldsize.hosts.commands",
    "skypilot": "worldsize.clouds.commands",
    "dstack": "worldsize.clouds.commands",
}
# Each scheduler has a module with a class `Jobs(Scheduler)`. The first is the default.
SCHEDULERS = {
    "kubernetes": "worldsize.cluster.jobs.scheduler",
    "slurm": "worldsize.slurm.scheduler",
    "ssh": "worldsize.hosts.scheduler",
}
# Schedulers whose jobs have a folder OUT/.jobs/NAME; the file `scheduler` in it names the scheduler.
JOBS_FOLDER = ".jobs"


def load(on: str, function: str) -> Callable[[list[str]], int]:
    """``train_on`` or ``render`` of a value of ``--on``.

    Raises:
        UserError: there is no such value.
    """
    if on not in TARGETS:
        raise UserError(f"--on {on}: expected one of {', '.join(TARGETS)}{did_you_mean(on, TARGETS)}")
    one: Callable[[list[str]], int] = getattr(importlib.import_module(TARGETS[on]), function)
    return one


def scheduler(name: str, where: Where) -> Scheduler:
    """The scheduler with this name."""
    one: Scheduler = importlib.import_module(SCHEDULERS[name]).Jobs(where)
    return one


def names(out: Path) -> list[str]:
    """The names of the jobs whose folder in ``out`` names their scheduler, sorted."""
    folder = out / JOBS_FOLDER
    return sorted(path.name for path in folder.iterdir() if recorded(out, path.name)) if folder.is_dir() else []


def recorded(out: Path, name: str) -> str | None:
    """The scheduler of the job ``name`` according to its folder in ``out``; None without a folder."""
    try:
        found = (out / JOBS_FOLDER / name / "scheduler").read_text().strip()
    except (OSError, ValueError):
        return None
    return found if found in SCHEDULERS else None
