"""This node's place in a job, from the variables of schedulers that start one command per node.

SkyPilot (SKYPILOT_*), dstack (DSTACK_*), PBS (PBS_NODEFILE, one command per node by ``pbsdsh``), and LSF
(LSB_DJOB_HOSTFILE, one command per node by ``blaunch -z``).
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping
from pathlib import Path

from worldsize.errors import UserError

_PORT = 29400


def torchrun_variables(env: Mapping[str, str], procs: int | None) -> dict[str, str] | None:
    """torchrun's PET_* variables for this node; None if none of the schedulers started it.

    Args:
        procs: processes per node; None: as many as the scheduler reports GPUs, or as torch finds, or 1.

    Raises:
        UserError: the scheduler's variables are incomplete.
    """
    for scheduler, variable, read in _SCHEDULERS:
        if variable in env:
            try:
                hosts, rank, gpus = read(env)
                return _variables(hosts, rank, procs or int(gpus or 0) or _gpus_here() or 1, env)
            except KeyError as missing:
                raise UserError(f"{scheduler} did not set {missing.args[0]}") from None
            except (ValueError, OSError) as error:
                raise UserError(f"{scheduler}'s variables cannot be read: {error}") from None
    return None


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def _variables(hosts: list[str], rank: int, procs: int, env: Mapping[str, str]) -> dict[str, str]:
    if not 0 <= rank < len(hosts):
        raise ValueError(f"they list {len(hosts)} hosts, and this one is number {rank}, counted from 0")
    return {
        "PET_NNODES": str(len(hosts)),
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": str(procs),
        "PET_MASTER_ADDR": hosts[0],
        "PET_MASTER_PORT": env.get("MASTER_PORT") or str(_PORT + zlib.crc32(_job(env).encode()) % 1000),
        "WORLDSIZE_PEERS": hosts[0] if rank else ",".join(hosts[1:2]),
    }


def _job(env: Mapping[str, str]) -> str:
    """The job's id, so that two jobs on a host use different ports; equal on all of its nodes."""
    names = ("SKYPILOT_TASK_ID", "DSTACK_RUN_ID", "PBS_JOBID", "LSB_JOBID")
    return next((env[name] for name in names if name in env), "")


def _skypilot(env: Mapping[str, str]) -> tuple[list[str], int, str]:
    hosts = env["SKYPILOT_NODE_IPS"].split()
    return hosts, int(env["SKYPILOT_NODE_RANK"]), env.get("SKYPILOT_NUM_GPUS_PER_NODE", "")


def _dstack(env: Mapping[str, str]) -> tuple[list[str], int, str]:
    first, count = env["DSTACK_MASTER_NODE_IP"], int(env["DSTACK_NODES_NUM"])
    if not first and count > 1:
        raise UserError("dstack gives the nodes of this backend no internal addresses: choose another one, or --nodes 1")
    first = first or "127.0.0.1"
    others = [host for host in env.get("DSTACK_NODES_IPS", "").split() if host != first]
    hosts = [first, *others] if len(others) == count - 1 else [first] * count
    return hosts, int(env["DSTACK_NODE_RANK"]), env.get("DSTACK_GPUS_PER_NODE", "")


def _pbs(env: Mapping[str, str]) -> tuple[list[str], int, str]:
    return _of_hostfile(Path(env["PBS_NODEFILE"]))


def _lsf(env: Mapping[str, str]) -> tuple[list[str], int, str]:
    return _of_hostfile(Path(env["LSB_DJOB_HOSTFILE"]))


def _of_hostfile(path: Path) -> tuple[list[str], int, str]:
    """The hosts of a file with one line per slot, and this host's number among them."""
    hosts = list(dict.fromkeys(path.read_text().split()))
    here = socket.gethostname()
    found = _named(here, hosts)
    if len(found) > 1:
        found = _named(socket.getfqdn(), found)
    if len(found) > 1:
        raise ValueError(f"{path} lists {', '.join(found)}, and this host calls itself {here}: give it its full name")
    if not found:
        raise ValueError(f"{path} does not list this host, {here}")
    return hosts, hosts.index(found[0]), ""


def _named(name: str, hosts: list[str]) -> list[str]:
    """Those of the hosts that best fit a name: all of it, or as far as both go, or without the domains."""
    labels = name.lower().split(".")
    others = {host: host.lower().split(".") for host in hosts}
    exact = [host for host, other in others.items() if other == labels]
    partly = [host for host, other in others.items() if all(a == b for a, b in zip(labels, other, strict=False))]
    return exact or partly or [host for host, other in others.items() if other[0] == labels[0]]


_SCHEDULERS = (
    ("SkyPilot", "SKYPILOT_NODE_RANK", _skypilot),
    ("dstack", "DSTACK_NODE_RANK", _dstack),
    ("PBS", "PBS_NODEFILE", _pbs),
    ("LSF", "LSB_DJOB_HOSTFILE", _lsf),
)
