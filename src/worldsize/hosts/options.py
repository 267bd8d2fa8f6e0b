"""The command-line options of a job on a list of hosts, and their conversion to a `HostsSpec`."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from worldsize import parallel
from worldsize.config import recipe_files
from worldsize.config.command_line import Flat, RecipeFlags
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.hosts.spec import HostsSpec, address, problems
from worldsize.jobs.naming import run_name
from worldsize.jobs.options import check_recipe, gpus_per_node, pair, refuse_empty
from worldsize.jobs.spec import Resources, refuse

# HOST, USER@HOST, or an IPv6 address in brackets; then its processes.
_HOST = re.compile(r"(?P<host>(?:[^\s:@]+@)?(?:\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]]+))(?::(?P<procs>\d+))?")


@dataclass(frozen=True)
class HostsOptions:
    """Options of a job on a list of hosts, in addition to its recipe."""

    hosts: str | None = None
    """The hosts, as ssh knows them, with their processes: h1:8,h2:8. Rank 0 is on the first."""
    hostfile: Path | None = None
    """Instead of --hosts: a file with one host per line, as HOST, HOST:8 or HOST slots=8."""
    name: str | None = None
    """Name of the run (default: the recipe's name and a hash of the recipe and the number of hosts and processes)."""
    out: Path = Path("runs")
    """Where run folders are created on the hosts; also the folder of the job's log on this machine."""
    gpus: int | None = None
    """GPUs per host (default: one per process; 0 to train on the CPU)."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Environment variable, as NAME=VALUE. Not for secrets: other users of a host can see them."""
    retries: int = 3
    """Consecutive restarts without a new checkpoint before the job fails."""
    grace: int = 120
    """Seconds for saving when the job is stopped."""
    folder: Path | None = None
    """Folder on the hosts from which relative paths start (default: the path of the current folder)."""
    python: str | None = None
    """Python that has worldsize, on the hosts (default: the one that runs this command)."""
    interface: str | None = None
    """Network interface between the hosts (default: that of each host's route to the others)."""
    address: str | None = None
    """Where the other hosts reach the first one (default: its name in --hosts)."""
    port: int = 29400
    """Port for it, free on the first host."""
    ssh_config: Path | None = None
    """Configuration file for ssh (default: your own)."""


@dataclass(frozen=True, kw_only=True)
class Render:
    """Print the command of each host, for those who cannot use ssh. Contacts no host.

    Any recipe setting can be changed by its dotted name; the defaults shown are the recipe's.
    """

    on: Literal["ssh"] = "ssh"
    """A list of hosts."""
    job: Flat[HostsOptions] = HostsOptions()
    settings: RecipeFlags


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Train RECIPE on a list of hosts, over one ssh connection to each, and print the output of all ranks.

    Any recipe setting can be changed by its dotted name; the defaults shown are the recipe's. Ctrl-C saves and stops; the
    same command resumes. Nothing is left running when this command, its terminal or the network disappears.
    Exit codes as of `train` on one machine; 2: a check of the hosts found an error.
    """

    on: Literal["ssh"] = "ssh"
    """A list of hosts."""
    preflight: bool = True
    """Check the hosts first."""
    print: bool = False
    """Print the command of each host instead, for those who cannot use ssh."""
    job: Flat[HostsOptions] = HostsOptions()
    settings: RecipeFlags


def to_spec(recipe: Recipe, stem: str, job: HostsOptions) -> HostsSpec:
    """The complete job.

    Raises:
        UserError: invalid options; lists all of them.
    """
    refuse_empty(job)
    hosts = _hosts(job)
    procs = {count for _, count in hosts}
    if len(procs) != 1:
        raise UserError("--hosts: every host must have the same number of processes")
    count = procs.pop()
    gpus = gpus_per_node(recipe, job.gpus, count)
    if gpus == 0:  # the hosts' processes would find their GPUs: nothing but the recipe keeps them from it
        recipe = recipe.model_copy(update={"device": "cpu"})
    check_recipe(recipe, [len(hosts)], count)
    names = tuple(name for name, _ in hosts)
    spec = HostsSpec(
        name=job.name or run_name(stem, recipe, "ssh", len(hosts), count),
        recipe=recipe_files.to_yaml(recipe),
        nodes=len(hosts),
        procs=count,
        resources=Resources(gpus=gpus),
        env=tuple(map(pair("--env"), job.env)),
        retries=job.retries,
        grace_s=job.grace,
        needs_mpi=parallel.strategy_class(recipe.parallel).needs_mpi,
        hosts=names,
        out=job.out,
        folder=job.folder or Path.cwd(),
        python=job.python or sys.executable,
        address=job.address or address(names[0]),
        port=job.port,
        interface=job.interface,
    )
    refuse(problems(spec))
    return spec


def _hosts(job: HostsOptions) -> list[tuple[str, int]]:
    """(name, processes) of each host."""
    if (job.hosts is None) == (job.hostfile is None):
        raise UserError("--on ssh needs --hosts h1:8,h2:8 or --hostfile FILE")
    if job.hosts is not None:
        return [_host(word, "--hosts") for word in job.hosts.split(",")]
    assert job.hostfile is not None
    try:
        lines = job.hostfile.read_text().splitlines()
    except OSError as error:
        raise UserError(f"--hostfile {job.hostfile} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"--hostfile {job.hostfile} is not a text file") from None
    entries = [line.partition("#")[0].strip() for line in lines]
    found = [_host(re.sub(r"\s+slots=", ":", entry), f"--hostfile {job.hostfile}") for entry in entries if entry]
    if not found:
        raise UserError(f"--hostfile {job.hostfile} has no hosts")
    return found


def _host(word: str, where: str) -> tuple[str, int]:
    match = _HOST.fullmatch(word)
    if match is None or word.startswith("-"):
        raise UserError(f"{where}: {word!r} is not HOST or HOST:PROCESSES")
    return match["host"], int(match["procs"] or 1)
