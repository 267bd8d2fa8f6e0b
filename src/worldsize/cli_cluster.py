"""The front door for clusters: one function per command, no logic of its own. Imports no torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from worldsize import arguments, catalog
from worldsize.arguments import Flat
from worldsize.errors import UserError
from worldsize.launch import options, target
from worldsize.launch.options import Where
from worldsize.launch.pod import to_yaml
from worldsize.recipe import Recipe

if TYPE_CHECKING:
    from worldsize.launch.cluster import Cluster
    from worldsize.launch.target import State

_FAILED, _REFUSED, _TIMED_OUT, _DETACHED = 1, 2, 3, 130
_Name = Annotated[str, tyro.conf.Positional]


def train_on(argv: list[str]) -> int:
    """``worldsize train RECIPE --on KIND``."""
    stem, recipe, rest = _recipe(argv, "train")
    asked = arguments.parse(options.Submit, rest, options.Submit(settings=recipe), f"train {stem} --on KIND")
    cluster = _cluster(asked.where)
    spec = options.to_spec(asked.settings, stem, asked.on, cluster.namespace, asked.job)
    one = target.load(asked.on)
    manifests = one.render(spec)
    if asked.preflight:
        from worldsize.launch import preflight

        if not preflight.run(cluster, asked.on, spec, manifests, quiet=True):
            return _REFUSED
    from worldsize.launch import jobs, show

    jobs.submit(cluster, spec, manifests)
    show.note(f"{one.kind} {spec.name} is in namespace {cluster.namespace}")
    if asked.detach:
        show.note(f"Follow it with: {cluster.command('logs', spec.name)}")
        return 0
    code = _follow(cluster, spec.name, asked.timeout, None)
    if code == 0:
        words = ("cluster", "files", "get", f"{spec.volumes[0]}:/runs/{spec.name}", "--image", spec.image)
        show.note(f"Bring the run home with: {cluster.command(*words)}")
    return code


def render(argv: list[str]) -> int:
    """``worldsize render``."""
    stem, recipe, rest = _recipe(argv, "render")
    if arguments.value_of("--on", rest) == "local":
        return _render_here(stem, recipe, arguments.without("--on", rest))
    asked = arguments.parse(options.Render, rest, options.Render(settings=recipe), f"render {stem} --on KIND")
    spec = options.to_spec(asked.settings, stem, asked.on, asked.namespace, asked.job)
    print(to_yaml(target.load(asked.on).render(spec)), end="")
    return 0


def _render_here(stem: str, recipe: Recipe, argv: list[str]) -> int:
    from worldsize.launch import script

    asked = arguments.parse(arguments.Train, argv, arguments.Train(recipe), f"render {stem} --on local")
    if asked.resume or asked.allow_changes:
        raise UserError("render --on local makes a new job: leave out --resume and --allow-changes")
    name = asked.name or options.run_name(stem, asked.settings, "local", options.Job(procs=asked.procs))
    print(script.render(catalog.to_yaml(asked.settings), name, asked.procs, asked.out, asked.retries), end="")
    return 0


@dataclass(frozen=True)
class Jobs:
    """The jobs of worldsize in the namespace, the newest first."""

    where: Flat[Where] = field(default_factory=Where)


def jobs(argv: list[str]) -> int:
    """``worldsize jobs``."""
    from rich.console import Console
    from rich.table import Table

    from worldsize.launch import jobs, show

    cluster = _cluster(arguments.parse(Jobs, argv, Jobs(), "jobs").where)
    found = jobs.every(cluster)
    if not found:
        print(f"no jobs in namespace {cluster.namespace}")
        return 0
    table = Table("name", "kind", "state", "pods", "age", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for job in found:
        table.add_row(job.name, job.target.kind, job.state.phase, str(len(job.pods)), show.age(job.age_s))
    Console().print(table)
    return 0


@dataclass(frozen=True)
class Status:
    """Where a job is: its state, its pods, and why they wait or how they ended."""

    name: _Name
    where: Flat[Where] = field(default_factory=Where)


def status(argv: list[str]) -> int:
    """``worldsize status``."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from worldsize.launch import jobs, show

    asked = arguments.parse(Status, argv, None, "status")
    job = jobs.find(_cluster(asked.where), asked.name)
    print(f"{job.target.kind} {job.name}: {job.state.phase}, {show.age(job.age_s)} old")
    if job.state.reason:
        print(f"  {job.state.reason}")
    table = Table("pod", "phase", "restarts", "node", "why", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, phase, restarts, node, why in jobs.pods_of(job):
        table.add_row(name, phase, str(restarts), node, Text(why))
    Console().print(table)
    return 0


@dataclass(frozen=True)
class Logs:
    """What all ranks of a job print, as one stream, until it ends; then as `worldsize wait`."""

    name: _Name
    rank: int | None = None
    """Only this rank."""
    timeout: float | None = None
    """Stop following after this many seconds (exit code 3)."""
    where: Flat[Where] = field(default_factory=Where)


def logs(argv: list[str]) -> int:
    """``worldsize logs``."""
    asked = arguments.parse(Logs, argv, None, "logs")
    return _follow(_cluster(asked.where), asked.name, asked.timeout, asked.rank)


@dataclass(frozen=True)
class Wait:
    """Wait for a job's end. Exit codes: 0 succeeded, 1 failed, 3 timed out."""

    name: _Name
    timeout: float | None = None
    """Seconds to wait at most (exit code 3)."""
    where: Flat[Where] = field(default_factory=Where)


def wait(argv: list[str]) -> int:
    """``worldsize wait``."""
    asked = arguments.parse(Wait, argv, None, "wait")
    return _follow(_cluster(asked.where), asked.name, asked.timeout, None, logs=False)


@dataclass(frozen=True)
class Stop:
    """Have a job save and leave the cluster's nodes; `worldsize train` under the same name goes on with it."""

    name: _Name
    where: Flat[Where] = field(default_factory=Where)


def stop(argv: list[str]) -> int:
    """``worldsize stop``."""
    from worldsize.launch import jobs

    asked = arguments.parse(Stop, argv, None, "stop")
    cluster = _cluster(asked.where)
    jobs.stop(cluster, jobs.find(cluster, asked.name))
    removal = cluster.command("delete", asked.name)
    print(f"{asked.name} has stopped; the same `worldsize train` goes on with it, {removal} removes it")
    return 0


@dataclass(frozen=True)
class Delete:
    """Remove jobs and all that was made for them; their runs stay on the volume."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    all: bool = False
    """All jobs of worldsize in the namespace."""
    older: str | None = None
    """With --all: only those that have ended and are older than this, such as 7d, 12h, 30m."""
    where: Flat[Where] = field(default_factory=Where)


def delete(argv: list[str]) -> int:
    """``worldsize delete``."""
    from worldsize.launch import jobs

    asked = arguments.parse(Delete, argv, Delete(), "delete")
    if (asked.name is None) == (not asked.all) or (asked.older and not asked.all):
        raise UserError("worldsize delete NAME, or worldsize delete --all [--older 7d]")
    cluster = _cluster(asked.where)
    chosen = jobs.every(cluster) if asked.name is None else [jobs.find(cluster, asked.name)]
    if asked.older:
        chosen = jobs.older_than(chosen, _duration(asked.older))
    for job in chosen:
        jobs.delete(cluster, job)
        print(f"removed {job.target.kind} {job.name}")
    if not chosen:
        print("nothing to remove")
    return 0


# What is done by a function of (arguments, cluster) in a module of its own: module, arguments' class, function.
_ON_CLUSTER: dict[str, tuple[str, str, str]] = {
    "cluster check": ("preflight", "ClusterCheck", "check"),
    "cluster volume create": ("volumes", "VolumeCreate", "create"),
    "cluster volume list": ("volumes", "VolumeList", "show"),
    "cluster volume delete": ("volumes", "VolumeDelete", "delete"),
    "cluster secret create": ("secrets", "SecretCreate", "create"),
    "cluster secret list": ("secrets", "SecretList", "show"),
    "cluster secret delete": ("secrets", "SecretDelete", "delete"),
    "cluster data fetch": ("datajob", "Fetch", "fetch"),
    "cluster files ls": ("files", "FilesList", "show"),
    "cluster files get": ("files", "FilesGet", "get"),
    "cluster files put": ("files", "FilesPut", "put"),
}


def cluster(argv: list[str]) -> int:
    """``worldsize cluster ...``."""
    if argv[:2] == ["files", "browse"]:
        from worldsize.launch import browse

        return browse.show(arguments.parse(browse.FilesBrowse, argv[2:], None, "cluster files browse"))
    for words in (3, 2):
        title = " ".join(["cluster", *argv[: words - 1]])
        if title in _ON_CLUSTER:
            module, kind, function = _ON_CLUSTER[title]
            commands = importlib.import_module(f"worldsize.launch.{module}")
            asked = arguments.parse(getattr(commands, kind), argv[words - 1 :], None, title)
            return int(getattr(commands, function)(asked, _cluster(asked.where)))
    print("usage: worldsize cluster WHAT ...\n")
    for title in [*_ON_CLUSTER, "cluster files browse"]:
        print(f"  worldsize {title}")
    print("\nEach explains itself: worldsize cluster check --help")
    return 0 if "-h" in argv or "--help" in argv else 64


def image(argv: list[str]) -> int:
    """``worldsize image build``."""
    from worldsize.launch import image

    if argv[:1] != ["build"]:
        print("usage: worldsize image build [--push REPOSITORY] ...\n\nThe image that pods run; --help says more.")
        return 0 if "-h" in argv or "--help" in argv else 64
    end = argv.index("--") if "--" in argv else len(argv)
    asked = arguments.parse(image.ImageBuild, argv[1:end], image.ImageBuild(), "image build")
    return image.build(asked, argv[end + 1 :])


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
    """Follow the job to its end and tell how it ended."""
    from worldsize.launch import jobs, show
    from worldsize.launch.follow import Follower

    job = jobs.find(cluster, name)
    follower = Follower(cluster, job.target, name, logs)
    try:
        state: State = show.follow(follower, timeout, rank)
    except show.TimedOut:
        show.note(f"{name} has not ended after {timeout:g} s; it goes on. {cluster.command('logs', name)} follows it")
        return _TIMED_OUT
    except KeyboardInterrupt:
        show.note(f"{name} goes on. {cluster.command('logs', name)} follows it, {cluster.command(job.end, name)} ends it")
        return _DETACHED
    show.ending(state, follower.failures())
    return 0 if state.phase == "Succeeded" else _FAILED


def _recipe(argv: list[str], command: str) -> tuple[str, Recipe, list[str]]:
    """(stem, recipe, the other arguments)."""
    if not argv or argv[0].startswith("-"):
        if "-h" in argv or "--help" in argv:
            return "RECIPE", Recipe(), argv
        raise UserError(f"which recipe? worldsize {command} RECIPE; there are: {', '.join(catalog.names())}; or a YAML file")
    return Path(argv[0]).stem, catalog.load(argv[0]), argv[1:]


def _cluster(where: Where) -> Cluster:
    from worldsize.launch.cluster import Cluster

    return Cluster(where.context, where.namespace)


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+)([dhm])", text)
    if match is None:
        raise UserError(f"--older {text!r}: write it as 7d, 12h or 30m")
    return timedelta(**{{"d": "days", "h": "hours", "m": "minutes"}[match[2]]: int(match[1])})
