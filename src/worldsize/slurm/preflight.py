"""Checks before a job is submitted to Slurm. Each names what is wrong, where, and the remedy."""

from __future__ import annotations

import math
import secrets
import shlex
from collections.abc import Iterable
from pathlib import Path

from worldsize import __version__
from worldsize.errors import UserError, did_you_mean
from worldsize.jobs.folder import JobFolder
from worldsize.launch import entry_point
from worldsize.slurm import api
from worldsize.slurm.api import Partition
from worldsize.slurm.spec import SlurmSpec, seconds

_CHOOSES_NODES = ("--reservation=", "--exclude=", "--nodelist=")


def problems(spec: SlurmSpec, script: Path) -> list[str]:
    """What keeps the job from running on this Slurm; empty if nothing is known to.

    Args:
        script: a file with the rendered script; Slurm itself judges it, and submits nothing.
    """
    found = list(_partition_problems(spec, api.partitions()))
    if not found and (reason := api.would_accept(script)) is not None:
        found.append(f"Slurm refuses the job: {reason}")
    return found


def probe(spec: SlurmSpec, folder: JobFolder) -> list[str]:
    """Problems found by a short job on the nodes: another version of worldsize, or runs on storage that is not shared.

    A container has its own worldsize, so with one, only the storage is checked.

    Raises:
        SlurmError: Slurm does not start it.
        UserError: the job's folder cannot be written.
    """
    token = secrets.token_hex(8)
    marker = folder.path / "probe"
    with folder.writing():
        folder.path.mkdir(parents=True, exist_ok=True)
        marker.write_text(token)
    worldsize = shlex.join(entry_point.command(spec.python))
    # `env` imports what training does. The version, or else the error, is the last line.
    version = f"echo {__version__}" if spec.container else f"{{ {worldsize} env >/dev/null && {worldsize} --version; }} 2>&1"
    ask = f'echo "$({version} | tail -n 1)"; echo "$(cat {shlex.quote(str(marker))} 2>/dev/null)"; hostname'
    words = "\n".join(["{", *spec.setup, "} >/dev/null 2>&1", ask]) if spec.setup else ask
    try:
        lines = api.on_nodes(spec.nodes, _placement(spec), ["bash", "-c", words]).splitlines()
    finally:
        marker.unlink(missing_ok=True)
    answers: dict[str, list[str]] = {}
    for line in lines:
        node, _, text = line.partition(":")
        answers.setdefault(node.strip(), []).append(text.strip())
    return [problem for answer in answers.values() for problem in _node_problems(answer, token, marker.parent)]


def _placement(spec: SlurmSpec) -> list[str]:
    """The options of the job that choose its nodes, for srun."""
    options = {"partition": spec.partition, "account": spec.account, "qos": spec.qos, "constraint": spec.constraint}
    chosen = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*chosen, *(option for option in spec.extra if option.startswith(_CHOOSES_NODES))]


def _node_problems(answer: list[str], token: str, folder: Path) -> Iterable[str]:
    """Problems of a node that answered with its version of worldsize, the token that it sees, and its name.

    A site's own programs may print lines before.
    """
    if len(answer) < 3:
        yield f"a node did not answer the probe, but printed: {' '.join(answer)}"
        return
    version, seen, node = answer[-3:]
    if not version[:1].isdigit():
        yield f"{node} cannot run worldsize: {version}; pass the --python, or a --setup, with which it can"
    elif version != __version__:
        yield f"{node} has worldsize {version}, this machine has {__version__}: install the same version"
    if seen != token:
        yield f"{node} does not see {folder}: put --out on storage that all nodes share"


def _partition_problems(spec: SlurmSpec, known: list[Partition]) -> Iterable[str]:
    names = sorted({one.name for one in known})
    wanted = spec.partition.split(",") if spec.partition is not None else [one.name for one in known if one.default]
    if not wanted:
        yield f"this Slurm has no default partition: pass --partition, one of {', '.join(names)}"
    for name in wanted:
        if name not in names:
            yield f"--partition {name} does not exist; partitions: {', '.join(names)}{did_you_mean(name, names)}"
    if chosen := [one for one in known if one.name in wanted]:
        yield from _limit_problems(spec, chosen)


def _limit_problems(spec: SlurmSpec, chosen: list[Partition]) -> Iterable[str]:
    """What no partition in ``chosen`` allows; with several, Slurm uses the one where the job starts first."""
    names = sorted({one.name for one in chosen})
    single = len(names) == 1
    partition = f"partition {names[0]}" if single else f"partitions {', '.join(names)}"
    are, has, allows = ("is", "has", "allows") if single else ("are", "have", "allow")
    if not any(one.up for one in chosen):
        yield f"{partition} {are} down: choose another --partition, or ask the cluster's administrator"
    if (nodes := max(sum(one.nodes for one in chosen if one.name == name) for name in names)) < spec.nodes:
        yield f"--nodes {spec.nodes}: {partition} {has} {nodes}"
    cores = (spec.cores_per_process or 1) * spec.procs
    if (most := max(one.cores for one in chosen)) < cores:
        yield f"--procs {spec.procs} needs {cores} cores per node; nodes of {partition} have at most {most}"
    if (memory := spec.memory_mib) is not None and (most := max(one.memory_mib for one in chosen)) < memory:
        yield f"--memory {spec.resources.memory}: nodes of {partition} have at most {most} MiB"
    if (most := max(one.gpus for one in chosen)) < spec.resources.gpus:
        remedy = "pass --gpus 0 to train on CPUs" if most == 0 else "lower --procs"
        yield f"--gpus {spec.resources.gpus}: nodes of {partition} have at most {most}; {remedy}"
    limit = max((one.time_limit for one in chosen), key=_seconds)
    if spec.time_s is not None and spec.time_s > _seconds(limit):
        yield f"--time {spec.time}: {partition} {allows} {limit}; pass that, the run continues in further allocations"


def _seconds(limit: str) -> float:
    """A partition's limit; endless if it cannot be read."""
    try:
        return seconds(limit)
    except UserError:
        return math.inf
