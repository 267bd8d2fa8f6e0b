"""The specification of a job on a list of hosts, and the command of each host (pure)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from worldsize.jobs.spec import JobSpec, name_problems, shape_problems, utf8_problems
from worldsize.launch import entry_point

RECIPE = "{recipe}"  # `worldsize.launch.lifeline` puts the recipe's path here


@dataclass(frozen=True, kw_only=True)
class HostsSpec(JobSpec):
    """One training job on several hosts, one agent on each.

    ``hosts`` are names for ssh; rank 0 is on the first. ``out`` is the folder of the runs and ``python`` starts worldsize,
    both as the hosts see them; relative paths are relative to ``folder``. ``address`` is where the other hosts reach the
    first one, ``port`` is free there. ``interface``: None: that of the route to the other hosts.
    """

    hosts: tuple[str, ...]
    out: Path
    folder: Path
    python: str
    address: str
    port: int
    interface: str | None = None


def problems(spec: HostsSpec) -> Iterable[str]:
    """Problems of the spec: one sentence each, with the remedy."""
    yield from shape_problems(spec)
    yield from name_problems(spec)
    duplicates = sorted({host for host in spec.hosts if spec.hosts.count(host) > 1})
    if duplicates:
        yield f"--hosts: {', '.join(duplicates)} is listed more than once; pass HOST:PROCESSES once"
    if not 1 <= spec.port <= 65535:
        yield f"--port {spec.port}: pass a port from 1 to 65535"
    paths = (str(spec.out), str(spec.folder), spec.python)
    yield from utf8_problems(
        (*spec.hosts, spec.address, spec.interface, *paths, *(word for pair in spec.env for word in pair))
    )
    if spec.needs_mpi:
        yield "this strategy requires MPI: start it with mpirun -H HOSTS ... worldsize train RECIPE"


def address(host: str) -> str:
    """What others connect to: ``host`` as in --hosts, without the user and the brackets of IPv6."""
    return host.rpartition("@")[2].strip("[]")


def peers(spec: HostsSpec, rank: int) -> list[str]:
    """A host to which the host with this number needs a route, if it is not alone."""
    return [spec.address] if rank else [address(host) for host in spec.hosts[1:2]]


def agent(spec: HostsSpec, rank: int) -> list[str]:
    """The words that start the agent of the host with this number."""
    variables = {
        "PET_NNODES": str(spec.nodes),
        "PET_NPROC_PER_NODE": str(spec.procs),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": spec.address,
        "PET_MASTER_PORT": str(spec.port),
        "PYTHONUNBUFFERED": "1",
        "WORLDSIZE_NODES": str(spec.nodes),
        "WORLDSIZE_PROCS": str(spec.procs),
    }
    # The agent finds its interface by the route to one of these.
    variables["WORLDSIZE_PEERS"] = ",".join(peers(spec, rank))
    if spec.interface:
        variables |= {"GLOO_SOCKET_IFNAME": spec.interface, "NCCL_SOCKET_IFNAME": spec.interface}
    variables |= dict(spec.env)
    train = ["train", RECIPE, "--out", str(spec.out), "--name", spec.name, "--autoresume", "--retries", str(spec.retries)]
    worldsize = [*entry_point.command(spec.python), "agent", "--id", spec.name, "--", *train]
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *worldsize]


def remote(spec: HostsSpec, rank: int) -> str:
    """The command line for the remote shell: the agent, for as long as the launcher lives."""
    lifeline = [*entry_point.command(spec.python, "worldsize.launch.lifeline"), str(spec.grace_s)]
    return f"cd {shlex.quote(str(spec.folder))} && exec {shlex.join([*lifeline, *agent(spec, rank)])}"


def by_hand(spec: HostsSpec) -> str:
    """What to type on each host, for those who cannot use ssh."""
    end = "END_OF_RECIPE"
    lines = [f"# On every host, in {spec.folder}:", f"cat > recipe.yaml <<'{end}'", spec.recipe.rstrip("\n"), end]
    for rank, host in enumerate(spec.hosts):
        words = ["recipe.yaml" if word == RECIPE else word for word in agent(spec, rank)]
        lines += ["", f"# On {host}, in {spec.folder}:", shlex.join(words)]
    return "\n".join(lines) + "\n"
