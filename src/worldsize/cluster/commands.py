"""The cluster commands: one thin function per command. Imports no torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from worldsize import arguments, catalog, parallel
from worldsize.arguments import Flat
from worldsize.cluster import options
from worldsize.cluster.manifests import load_target
from worldsize.cluster.manifests.pod import to_yaml
from worldsize.cluster.options import Where
from worldsize.cluster.terminal import age, note
from worldsize.errors import DETACHED, FAILED, PREFLIGHT_FAILED, SUCCESS, TIMED_OUT, UserError
from worldsize.recipe import Recipe

if TYPE_CHECKING:
    from worldsize.cluster.api.client import Cluster
    from worldsize.cluster.manifests.base import JobState

_Name = Annotated[str, tyro.conf.Positional]


def train_on(argv: list[str]) -> int:
    """``worldsize train RECIPE --on KIND``."""
    stem, recipe, rest = _recipe(argv, "train")
    asked = arguments.parse(options.Submit, rest, options.Submit(settings=recipe), f"train {stem} --on KIND")
    cluster = _cluster(asked.where)
    spec = options.to_spec(asked.settings, stem, asked.on, cluster.namespace, asked.job)
    one = load_target(asked.on)
    manifests = one.render(spec)
    if asked.preflight:
        from worldsize.cluster.preflight import runner

        if not runner.run(cluster, asked.on, spec, manifests, quiet=True):
            return PREFLIGHT_FAILED
    from worldsize.cluster.jobs import manage

    manage.submit(cluster, spec, manifests)
    note(f"Created {one.kind} {spec.name} in namespace {cluster.namespace}")
    if asked.detach:
        note(f"Follow it with: {cluster.command('logs', spec.name)}")
        return SUCCESS
    code = _follow(cluster, spec.name, asked.timeout, None)
    if code == SUCCESS:
        download = ("cluster", "files", "get", f"{spec.volumes[0]}:/runs/{spec.name}", "--image", spec.image)
        note(f"Download the run with: {cluster.command(*download)}")
    return code


def render(argv: list[str]) -> int:
    """``worldsize render``."""
    stem, recipe, rest = _recipe(argv, "render")
    if arguments.value_of("--on", rest) == "local":
        return _render_local(stem, recipe, arguments.without("--on", rest))
    asked = arguments.parse(options.Render, rest, options.Render(settings=recipe), f"render {stem} --on KIND")
    spec = options.to_spec(asked.settings, stem, asked.on, asked.namespace, asked.job)
    print(to_yaml(load_target(asked.on).render(spec)), end="")
    return SUCCESS


def _render_local(stem: str, recipe: Recipe, argv: list[str]) -> int:
    from worldsize.launch import script

    asked = arguments.parse(arguments.Train, argv, arguments.Train(recipe), f"render {stem} --on local")
    if asked.resume or asked.allow_changes:
        raise UserError("render --on local describes a new job: omit --resume and --allow-changes")
    parallel.validate(asked.settings)
    name = asked.name or options.run_name(stem, asked.settings, "local", options.JobOptions(procs=asked.procs))
    print(script.render(catalog.to_yaml(asked.settings), name, asked.procs, asked.out, asked.retries), end="")
    return SUCCESS


@dataclass(frozen=True)
class Jobs:
    """List worldsize jobs in the namespace, newest first."""

    where: Flat[Where] = field(default_factory=Where)


def jobs(argv: list[str]) -> int:
    """``worldsize jobs``."""
    from rich.console import Console
    from rich.table import Table

    from worldsize.cluster.jobs import manage

    cluster = _cluster(arguments.parse(Jobs, argv, Jobs(), "jobs").where)
    found = manage.list_jobs(cluster)
    if not found:
        print(f"no worldsize jobs in namespace {cluster.namespace}")
        return SUCCESS
    table = Table("name", "kind", "state", "pods", "age", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for job in found:
        table.add_row(job.name, job.target.kind, job.state.phase, str(len(job.pods)), age(job.age_s))
    Console().print(table)
    return SUCCESS


@dataclass(frozen=True)
class Status:
    """Show a job's state, its pods, and why they are waiting or how they ended."""

    name: _Name
    where: Flat[Where] = field(default_factory=Where)


def status(argv: list[str]) -> int:
    """``worldsize status``."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from worldsize.cluster.jobs import manage

    asked = arguments.parse(Status, argv, None, "status")
    job = manage.find(_cluster(asked.where), asked.name)
    print(f"{job.target.kind} {job.name}: {job.state.phase}, {age(job.age_s)} old")
    if job.state.reason:
        print(f"  {job.state.reason}")
    table = Table("pod", "phase", "restarts", "node", "reason", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, phase, restarts, node, reason in manage.pods_of(job):
        table.add_row(name, phase, str(restarts), node, Text(reason))
    Console().print(table)
    return SUCCESS


@dataclass(frozen=True)
class Logs:
    """Print the output of all ranks as one stream until the job ends. Exit codes: see `worldsize wait`."""

    name: _Name
    rank: int | None = None
    """Print only this rank."""
    timeout: float | None = None
    """Stop following after this many seconds (exit code 3)."""
    where: Flat[Where] = field(default_factory=Where)


def logs(argv: list[str]) -> int:
    """``worldsize logs``."""
    asked = arguments.parse(Logs, argv, None, "logs")
    return _follow(_cluster(asked.where), asked.name, asked.timeout, asked.rank)


@dataclass(frozen=True)
class Wait:
    """Wait for a job to end. Exit codes: 0 succeeded, 1 failed, 3 timed out."""

    name: _Name
    timeout: float | None = None
    """Stop waiting after this many seconds (exit code 3)."""
    where: Flat[Where] = field(default_factory=Where)


def wait(argv: list[str]) -> int:
    """``worldsize wait``."""
    asked = arguments.parse(Wait, argv, None, "wait")
    return _follow(_cluster(asked.where), asked.name, asked.timeout, None, logs=False)


@dataclass(frozen=True)
class Stop:
    """Save a job's state and end its pods; `worldsize train` with the same name resumes it."""

    name: _Name
    where: Flat[Where] = field(default_factory=Where)


def stop(argv: list[str]) -> int:
    """``worldsize stop``."""
    from worldsize.cluster.jobs import manage

    asked = arguments.parse(Stop, argv, None, "stop")
    cluster = _cluster(asked.where)
    manage.stop(cluster, manage.find(cluster, asked.name))
    delete_command = cluster.command("delete", asked.name)
    print(f"{asked.name} is stopped. To resume it, repeat its `worldsize train`; to delete it: {delete_command}")
    return SUCCESS


@dataclass(frozen=True)
class Delete:
    """Delete jobs and the objects created for them; their runs stay on the volume."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    all: bool = False
    """All worldsize jobs in the namespace."""
    older: str | None = None
    """With --all: only jobs that have ended or are stopped and are older than this, such as 7d, 12h, 30m."""
    where: Flat[Where] = field(default_factory=Where)


def delete(argv: list[str]) -> int:
    """``worldsize delete``."""
    from worldsize.cluster.jobs import manage

    asked = arguments.parse(Delete, argv, Delete(), "delete")
    if (asked.name is None) == (not asked.all) or (asked.older and not asked.all):
        raise UserError("expected: worldsize delete NAME, or worldsize delete --all [--older 7d]")
    cluster = _cluster(asked.where)
    chosen = manage.list_jobs(cluster) if asked.name is None else [manage.find(cluster, asked.name)]
    if asked.older:
        chosen = manage.older_than(chosen, _duration(asked.older))
    for job in chosen:
        manage.delete(cluster, job)
        print(f"deleted {job.target.kind} {job.name}")
    if not chosen:
        print("nothing to delete")
    return SUCCESS


# Commands implemented by function(arguments, cluster): module, class of the arguments, function.
_ON_CLUSTER: dict[str, tuple[str, str, str]] = {
    "cluster check": ("preflight.runner", "ClusterCheck", "check"),
    "cluster volume create": ("storage.volumes", "VolumeCreate", "create"),
    "cluster volume list": ("storage.volumes", "VolumeList", "show"),
    "cluster volume delete": ("storage.volumes", "VolumeDelete", "delete"),
    "cluster secret create": ("storage.secrets", "SecretCreate", "create"),
    "cluster secret list": ("storage.secrets", "SecretList", "show"),
    "cluster secret delete": ("storage.secrets", "SecretDelete", "delete"),
    "cluster data fetch": ("jobs.fetch", "Fetch", "fetch"),
    "cluster files ls": ("storage.files", "FilesList", "show"),
    "cluster files get": ("storage.files", "FilesGet", "get"),
    "cluster files put": ("storage.files", "FilesPut", "put"),
}


def cluster(argv: list[str]) -> int:
    """``worldsize cluster ...``."""
    if argv[:2] == ["files", "browse"]:
        from worldsize.cluster.storage import browse

        return browse.show(arguments.parse(browse.FilesBrowse, argv[2:], None, "cluster files browse"))
    for words in (3, 2):
        title = " ".join(["cluster", *argv[: words - 1]])
        if title in _ON_CLUSTER:
            module, kind, function = _ON_CLUSTER[title]
            commands = importlib.import_module(f"worldsize.cluster.{module}")
            asked = arguments.parse(getattr(commands, kind), argv[words - 1 :], None, title)
            return int(getattr(commands, function)(asked, _cluster(asked.where)))
    print("usage: worldsize cluster COMMAND ...\n")
    for title in [*_ON_CLUSTER, "cluster files browse"]:
        print(f"  worldsize {title}")
    print("\nHelp for each command: worldsize cluster check --help")
    return _usage_code(argv)


def image(argv: list[str]) -> int:
    """``worldsize image build``."""
    from worldsize.cluster.image import build

    if argv[:1] != ["build"]:
        print("usage: worldsize image build [--push REPOSITORY] ...\n\nHelp: worldsize image build --help")
        return _usage_code(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    asked = arguments.parse(build.ImageBuild, argv[1:end], build.ImageBuild(), "image build")
    return build.build(asked, argv[end + 1 :])


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "render": render,
    "jobs": jobs,
    "status": status,
    "logs": logs,
    "wait": wait,
    "stop": stop,
    "delete": delete,
    "cluster": cluster,
    "image": image,
}


def _follow(cluster: Cluster, name: str, timeout: float | None, rank: int | None, logs: bool = True) -> int:
    """Follow the job until it ends, and print how it ended. Returns the exit code."""
    from worldsize.cluster.jobs import display, manage
    from worldsize.cluster.jobs.follow import Follower

    job = manage.find(cluster, name)
    follower = Follower(cluster, job.target, name, logs)
    try:
        state: JobState = display.follow(follower, timeout, rank)
    except display.TimedOut:
        note(f"{name} has not ended after {timeout:g} s; it keeps running. Follow it with: {cluster.command('logs', name)}")
        return TIMED_OUT
    except KeyboardInterrupt:
        note(f"Detached; {name} keeps running. Follow it with: {cluster.command('logs', name)}")
        note(f"End it with: {cluster.command(job.end_command, name)}")
        return DETACHED
    display.ending(state, follower.failures())
    return SUCCESS if state.phase == "Succeeded" else FAILED


def _usage_code(argv: list[str]) -> int:
    return SUCCESS if "-h" in argv or "--help" in argv else UserError.exit_code


def _recipe(argv: list[str], command: str) -> tuple[str, Recipe, list[str]]:
    """(stem, recipe, remaining arguments)."""
    if not argv or argv[0].startswith("-"):
        if "-h" in argv or "--help" in argv:
            return "RECIPE", Recipe(), argv
        raise catalog.missing(command)
    return Path(argv[0]).stem, catalog.load(argv[0]), argv[1:]


def _cluster(where: Where) -> Cluster:
    from worldsize.cluster.api.client import Cluster

    return Cluster(where.context, where.namespace)


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+)([dhm])", text)
    if match is None:
        raise UserError(f"--older {text!r}: expected a duration such as 7d, 12h or 30m")
    return timedelta(**{{"d": "days", "h": "hours", "m": "minutes"}[match[2]]: int(match[1])})
