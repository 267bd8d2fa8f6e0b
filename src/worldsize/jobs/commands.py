"""The commands about jobs, whatever runs them: one thin function per command. Imports no torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import tyro

from worldsize.config import command_line, recipe_files
from worldsize.config.command_line import Flat
from worldsize.config.recipe import Recipe
from worldsize.distributed.stop_signals import nothing_was
from worldsize.errors import DETACHED, FAILED, SUCCESS, TIMED_OUT, UserError, WorldsizeError, did_you_mean
from worldsize.jobs import display, targets
from worldsize.jobs.base import Job, Scheduler, Where
from worldsize.jobs.progress import progress
from worldsize.jobs.state import JobState
from worldsize.jobs.terminal import age, note

_Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
_On = Literal["kubernetes", "slurm", "ssh"] | None


def train_on(argv: list[str]) -> int:
    """``worldsize train RECIPE --on TARGET``."""
    on = command_line.value_of("--on", argv)
    assert on is not None
    with nothing_was("submitted"):
        train_on_target = targets.load(on, "train_on")
    return train_on_target(argv)


def render(argv: list[str]) -> int:
    """``worldsize render``."""
    on = command_line.value_of("--on", argv)
    if on is None and (not argv or command_line.asks_help(argv)):
        print(
            "usage: worldsize render RECIPE --on TARGET ...\n\n"
            "Prints a job exactly as `worldsize train --on TARGET` submits it. Contacts no cluster.\n"
            f"Targets: {', '.join(targets.TARGETS)}. Options of each: worldsize render RECIPE --on TARGET --help"
        )
        return SUCCESS if command_line.asks_help(argv) else UserError.exit_code
    return targets.load(on or "pytorchjob", "render")(argv)


@dataclass(frozen=True)
class Jobs:
    """List worldsize jobs, newest first: those of Slurm and ssh in the folder of the runs, and those in the namespace of a
    Kubernetes cluster if one is configured."""

    on: _On = None
    """List only this scheduler's."""
    where: Flat[Where] = field(default_factory=Where)


def jobs(argv: list[str]) -> int:
    """``worldsize jobs``."""

    from worldsize.config import tables

    asked = command_line.parse(Jobs, argv, Jobs(), "jobs")
    chosen = _schedulers(asked.on, asked.where)
    found = [(scheduler, job) for scheduler in chosen for job in _listed(scheduler, alone=len(chosen) == 1)]
    if not found:
        print(f"no worldsize jobs {' or '.join(scheduler.place for scheduler in chosen)}")
        return SUCCESS
    table = tables.table("name", "kind", "state", "parts", "age")
    for scheduler, job in sorted(found, key=lambda pair: pair[1].age_s):
        count = len(job.parts())
        parts = f"{count} {scheduler.part}{'s' * (count != 1)}"
        table.add_row(job.name, job.kind, job.state.phase, parts, age(job.age_s))
    tables.console().print(table)
    return SUCCESS


@dataclass(frozen=True)
class Status:
    """Show a job's state, how far its run is, its parts, and why they are waiting or how they ended."""

    name: _Name
    """The job, by its name in `worldsize jobs`."""
    on: _On = None
    """Where the job runs (default: wherever a job of this name is found)."""
    where: Flat[Where] = field(default_factory=Where)


def status(argv: list[str]) -> int:
    """``worldsize status``."""
    from rich.text import Text

    from worldsize.config import tables

    asked = command_line.parse(Status, argv, None, "status")
    scheduler, job = find(asked.name, asked.on, asked.where)
    print(f"{job.kind} {job.name}: {job.state.phase}, {age(job.age_s)} old")
    if job.state.reason:
        print(f"  {job.state.reason}")
    for text in job.warnings():
        print(f"  {text}")
    if (line := progress(job.metrics(), job.recipe())) is not None:
        print(f"  {line}")
    titles = (scheduler.part, "phase", "restarts", "machine", "reason")
    table = tables.table(*titles)
    for part in job.parts():
        table.add_row(part.name, part.phase, str(part.restarts), part.machine, Text(part.reason))
    tables.console().print(table)
    return SUCCESS


@dataclass(frozen=True)
class Logs:
    """Print the output of all ranks as one stream until the job ends. Exit codes: see `worldsize wait`."""

    name: _Name
    """The job, by its name in `worldsize jobs`."""
    rank: int | None = None
    """Print only this rank."""
    timeout: float | None = None
    """Stop following after this many seconds (exit code 3)."""
    on: _On = None
    """Where the job runs (default: wherever a job of this name is found)."""
    where: Flat[Where] = field(default_factory=Where)


def logs(argv: list[str]) -> int:
    """``worldsize logs``."""
    asked = command_line.parse(Logs, argv, None, "logs")
    return follow(*find(asked.name, asked.on, asked.where), asked.timeout, asked.rank)


@dataclass(frozen=True)
class Wait:
    """Wait for a job to end. Exit codes: 0 succeeded, 1 failed, 3 timed out, 130 detached."""

    name: _Name
    """The job, by its name in `worldsize jobs`."""
    timeout: float | None = None
    """Stop waiting after this many seconds (exit code 3)."""
    on: _On = None
    """Where the job runs (default: wherever a job of this name is found)."""
    where: Flat[Where] = field(default_factory=Where)


def wait(argv: list[str]) -> int:
    """``worldsize wait``."""
    asked = command_line.parse(Wait, argv, None, "wait")
    return follow(*find(asked.name, asked.on, asked.where), asked.timeout, None, logs=False)


@dataclass(frozen=True)
class Stop:
    """Save a job's state and end it; `worldsize train` with the same name resumes it."""

    name: _Name
    """The job, by its name in `worldsize jobs`."""
    on: _On = None
    """Where the job runs (default: wherever a job of this name is found)."""
    where: Flat[Where] = field(default_factory=Where)


def stop(argv: list[str]) -> int:
    """``worldsize stop``."""
    asked = command_line.parse(Stop, argv, None, "stop")
    scheduler, job = find(asked.name, asked.on, asked.where)
    job.stop()
    delete_command = scheduler.command("delete", asked.name)
    print(f"{asked.name} is stopped. To resume it, repeat its `worldsize train`; to delete it: {delete_command}")
    return SUCCESS


@dataclass(frozen=True)
class Delete:
    """Delete jobs and what was created for them; their runs stay."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    all: bool = False
    """All worldsize jobs of the scheduler."""
    older: str | None = None
    """With --all: only jobs that have ended or are stopped and are older than this, such as 7d, 12h, 30m."""
    on: _On = None
    """The scheduler (default: found by name; with --all, Kubernetes)."""
    where: Flat[Where] = field(default_factory=Where)


def delete(argv: list[str]) -> int:
    """``worldsize delete``."""
    asked = command_line.parse(Delete, argv, Delete(), "delete")
    if (asked.name is None) == (not asked.all) or (asked.older is not None and not asked.all):
        raise UserError("expected: worldsize delete NAME, or worldsize delete --all [--older 7d]")
    if asked.name is None:
        chosen = targets.scheduler(asked.on or "kubernetes", asked.where).jobs()
    else:
        chosen = [find(asked.name, asked.on, asked.where)[1]]
    if asked.older is not None:
        chosen = older_than(chosen, _duration(asked.older))
    for job in chosen:
        job.delete()
        print(f"deleted {job.kind} {job.name}")
    if not chosen:
        print("nothing to delete")
    return SUCCESS


def find(name: str, on: str | None, where: Where) -> tuple[Scheduler, Job]:
    """The job of this name, and its scheduler.

    Args:
        on: the scheduler; None: the one that a folder in ``where.out`` names, otherwise Kubernetes.

    Raises:
        UserError: there is no such job.
    """
    on_cluster = where.context is not None or where.namespace is not None
    chosen = on or (None if on_cluster else targets.recorded(where.out, name)) or "kubernetes"
    try:
        scheduler = targets.scheduler(chosen, where)
        found = scheduler.jobs()
    except UserError:
        names = [] if on or on_cluster else targets.names(where.out)
        if not names:
            raise
        hint = did_you_mean(name, names)
        raise UserError(
            f"no job {name!r} in {where.out / targets.JOBS_FOLDER}; existing jobs: {', '.join(names)}{hint} "
            "(there is no Kubernetes cluster to ask)"
        ) from None
    for job in found:
        if job.name == name:
            return scheduler, job
    existing = f"existing jobs: {', '.join(job.name for job in found)}" if found else "there are no worldsize jobs"
    raise UserError(f"no job {name!r} {scheduler.place}; {existing}")


def follow(scheduler: Scheduler, job: Job, timeout: float | None, rank: int | None, logs: bool = True) -> int:
    """Follow the job until it ends, and print how it ended. Returns the exit code."""
    name, follower = job.name, job.follower(logs)
    try:
        state: JobState = display.follow(follower, timeout, rank)
    except display.TimedOut:
        note(
            f"{name} has not ended after {timeout:g} s; it keeps running. Follow it with: {scheduler.command('logs', name)}"
        )
        return TIMED_OUT
    except KeyboardInterrupt:
        return detached(scheduler, name, job.end_command)
    display.ending(state, follower.failures())
    return SUCCESS if state.phase == "Succeeded" else FAILED


def detached(scheduler: Scheduler, name: str, end_command: str) -> int:
    """Print that the job keeps running after Ctrl-C. Returns the exit code."""
    note(f"Detached; {name} keeps running. Follow it with: {scheduler.command('logs', name)}")
    note(f"End it with: {scheduler.command(end_command, name)}")
    return DETACHED


def older_than(jobs: Sequence[Job], limit: timedelta) -> list[Job]:
    """The jobs that have ended or are stopped and were created longer ago than ``limit``."""
    return [job for job in jobs if job.inactive and job.age_s > limit.total_seconds()]


def recipe_argument(argv: list[str], command: str) -> tuple[str, Recipe, list[str]]:
    """(stem, recipe, remaining arguments) of a command line that begins with RECIPE.

    Raises:
        UserError: no recipe, or an invalid one.
    """
    if not argv or argv[0].startswith("-"):
        if command_line.asks_help(argv):
            return "RECIPE", Recipe(), argv
        raise recipe_files.missing(command)
    return Path(argv[0]).stem, recipe_files.load(argv[0]), argv[1:]


def _listed(scheduler: Scheduler, alone: bool) -> list[Job]:
    """The scheduler's jobs; if it is not ``alone`` and does not answer, none, with a message."""
    try:
        return scheduler.jobs()
    except WorldsizeError as error:
        if alone:
            raise
        print(f"not all jobs are listed: {str(error).splitlines()[0]}", file=sys.stderr)
        return []


def _schedulers(on: str | None, where: Where) -> list[Scheduler]:
    """The schedulers whose jobs are listed."""
    if on is not None:
        return [targets.scheduler(on, where)]
    if where.context is not None or where.namespace is not None:
        return [targets.scheduler("kubernetes", where)]
    own = {targets.recorded(where.out, name) for name in targets.names(where.out)}
    found = [targets.scheduler(name, where) for name in targets.SCHEDULERS if name in own]
    try:
        return [*found, targets.scheduler("kubernetes", where)]
    except UserError as error:
        if not found:
            raise
        print(f"no Kubernetes jobs listed: {str(error).splitlines()[0]}", file=sys.stderr)
        return found


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,6})([dhm])", text, re.ASCII)
    if match is None:
        raise UserError(f"--older {text!r}: expected a duration such as 7d, 12h or 30m")
    return timedelta(**{{"d": "days", "h": "hours", "m": "minutes"}[match[2]]: int(match[1])})
