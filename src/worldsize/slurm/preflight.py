"""Checks before a job is submitted to Slurm. Each names what is wrong, where, and the remedy."""

from __future__ import annotations

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
    """
    token = secrets.token_hex(8)
    folder.path.mkdir(parents=True, exist_ok=True)
    marker = folder.path / "probe"
    marker.write_text(token)
    worldsize = shlex.join(entry_point.command(spec.python))
    # `env` imports what training does. The version, or else the error, is the last line.
    version = f"echo {__version__}" if spec.container else f"{{ {worldsize} env >/dev/null && {worldsize} --version; }} 2>&1"
    ask = f'echo "$({version} | tail -n 1)"; echo "$(cat {shlex.quote(str(marker))} 2>/dev/null)"; hostname'
    words = "\n".join(["{", *spec.setup, "} >/dev/null 2>&1", ask]) if spec.setup else ask
    try:
        lines = api.on_nodes(spec.nodes, spec.partition, spec.account, ["bash", "-c", words]).splitlines()
    finally:
        marker.unlink()
    answers: dict[str, list[str]] = {}
    for line in lines:
        node, _, text = line.partition(":")
        answers.setdefault(node.strip(), []).append(text.strip())
    return [problem for answer in answers.values() for problem in _node_problems(answer, token, marker.parent)]


def _node_problems(answer: list[str], token: str, folder: Path) -> Iterable[str]:
    """Problems of a node that answered with its version of worldsize, the token that it sees, and its name."""
    version, seen, node = answer
    if not version[:1].isdigit():
        yield f"{node} cannot run worldsize: {version}; pass the --python, or a --setup, with which it can"
    elif version != __version__:
        yield f"{node} has worldsize {version}, this machine has {__version__}: install the same version"
    if seen != token:
        yield f"{node} does not see {folder}: put --out on storage that all nodes share"


def _partition_problems(spec: SlurmSpec, known: list[Partition]) -> Iterable[str]:
    names = sorted({one.name for one in known})
    chosen = [one for one in known if one.name == spec.partition or (spec.partition is None and one.default)]
    if not chosen:
        if spec.partition is None:
            yield f"this Slurm has no default partition: pass --partition, one of {', '.join(names)}"
        else:
            hint = did_you_mean(spec.partition, names)
            yield f"--partition {spec.partition} does not exist; partitions: {', '.join(names)}{hint}"
        return
    name = chosen[0].name
    if not any(one.up for one in chosen):
        yield f"partition {name} is down: choose another --partition, or ask the cluster's administrator"
    if (nodes := sum(one.nodes for one in chosen)) < spec.nodes:
        yield f"--nodes {spec.nodes}: partition {name} has {nodes}"
    cores = (spec.cores_per_process or 1) * spec.procs
    if (most := max(one.cores for one in chosen)) < cores:
        yield f"--procs {spec.procs} needs {cores} cores per node; nodes of partition {name} have at most {most}"
    if (memory := spec.memory_mib) is not None and (most := max(one.memory_mib for one in chosen)) < memory:
        yield f"--memory {spec.resources.memory}: nodes of partition {name} have at most {most} MiB"
    if (most := max(one.gpus for one in chosen)) < spec.resources.gpus:
        remedy = "pass --gpus 0 to train on CPUs" if most == 0 else "lower --procs"
        yield f"--gpus {spec.resources.gpus}: nodes of partition {name} have at most {most}; {remedy}"
    limit = chosen[0].time_limit
    if spec.time_s is not None and limit != "infinite" and spec.time_s > _seconds(limit):
        yield f"--time {spec.time}: partition {name} allows {limit}; pass that, the run continues in further allocations"


def _seconds(limit: str) -> int:
    """A partition's limit; endless if it cannot be read."""
    try:
        return seconds(limit)
    except UserError:
        return 10**12
