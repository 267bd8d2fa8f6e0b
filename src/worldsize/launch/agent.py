"""The agent of one node in a multi-node job: starts the node's processes and restarts them together with the other nodes'.

It reads torchrun's PET_* variables and runs torchrun's elastic agent, with three differences: a non-retryable error ends
the job immediately with its own exit code; if the rendezvous host moves to another machine, the agent rejoins it; every
log line starts with the rank that wrote it.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from worldsize.distributed.rank import LOCAL_LAUNCH, cores
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import PERMANENT, SIGNAL_BASE, SUCCESS, Stopped, UserError, first_line
from worldsize.launch import failed_workers, nodes, route
from worldsize.launch.local import Outcome, cause, reports, run_elastic

AGENT = "WORLDSIZE_AGENT"
# Job controllers retry exit codes of 128 and above, and give up on lower ones.
RETRYABLE = SIGNAL_BASE + signal.SIGTERM
_RENDEZVOUS_TIMEOUT_S = 1800.0  # a node that starts elsewhere may first have to pull its container image
_MAX_RESTARTS = 100  # by the agent; a run without progress gives up by itself, much earlier


@dataclass(frozen=True)
class Node:
    """This node's place in a job.

    ``nodes`` is (minimum, maximum); ``host`` and ``port`` are the rendezvous endpoint, ``is_host`` is whether this node
    hosts it; ``address`` is where the other nodes reach this one.
    """

    run_id: str
    nodes: tuple[int, int]
    procs: int
    host: str
    port: int
    is_host: bool
    address: str


def discover(run_id: str, env: MutableMapping[str, str] = os.environ, procs: int | None = None) -> Node:
    """This node's place, from torchrun's PET_* variables or those of a scheduler, see `nodes`.

    Args:
        procs: processes per node; None: as the variables say.

    Raises:
        UserError: a variable is missing or invalid.
    """
    if "PET_NPROC_PER_NODE" not in env and (found := nodes.torchrun_variables(env, procs)) is not None:
        env.update(found)
    try:
        minimum, _, maximum = env.get("PET_NNODES", "1").partition(":")
        endpoint = env.get("PET_RDZV_ENDPOINT") or f"{env['PET_MASTER_ADDR']}:{env['PET_MASTER_PORT']}"
        host, _, port = endpoint.rpartition(":")
        rank = env.get("PET_NODE_RANK")
        here = socket.gethostname()
        return Node(
            run_id,
            (int(minimum), int(maximum or minimum)),
            _procs(env["PET_NPROC_PER_NODE"]) if procs is None else procs,
            host,
            int(port),
            int(rank) == 0 if rank is not None else _is_here(host),
            env.get("WORLDSIZE_ADDRESS", here),
        )
    except KeyError as missing:
        raise UserError(
            f"{missing.args[0]} is not set: `worldsize agent` requires torchrun's PET_* variables, or those of SkyPilot, "
            "dstack, PBS or LSF"
        ) from None
    except ValueError as error:
        raise UserError(f"invalid PET_* variables: torchrun cannot read them: {error}") from None


def _is_here(host: str) -> bool:
    """Whether a name, with or without its domain, or an address is this machine's; the case of names does not count."""
    host = host.lower()
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return host.partition(".")[0] == socket.gethostname().lower().partition(".")[0]
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family) as own:  # only a machine's own address can be bound
        own.bind((str(address), 0))
        return True
    return False


def _procs(text: str) -> int:
    """Processes per node; operators also set torchrun's words, by default "auto": one per GPU, without GPUs one per core."""
    if text not in ("auto", "gpu", "cpu"):
        return int(text)
    import torch

    gpus = torch.cuda.device_count() if text != "cpu" and torch.cuda.is_available() else 0
    if text == "gpu" and gpus == 0:
        raise UserError("PET_NPROC_PER_NODE is gpu, but torch finds no GPU in this pod or on this machine")
    return gpus or cores()


def run(argv: Sequence[str], node: Node) -> Outcome:
    """Run ``worldsize ARGV`` as ``node.procs`` processes on this node, together with the other nodes, to the end.

    Returns:
        `SUCCESS`; the exit code (below 128) and message of the first non-retryable failure; `RETRYABLE` if this node was
        asked to leave, or if the other nodes did not connect.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    # The elastic agent handles signals only once its workers run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(RETRYABLE))
    os.environ[AGENT] = "1"
    node = _on_the_route(node)
    # Otherwise the ranks rendezvous in the agents' store under a restart count on which agents may disagree.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    lost_since: float | None = None
    while True:
        started = time.monotonic()
        try:
            return _once(argv, node)
        except SignalException as interrupt:
            return Outcome(SIGNAL_BASE + interrupt.sigval)
        except (RendezvousError, DistError) as error:
            now = time.monotonic()
            lost_since = started if lost_since is None or now - started > _RENDEZVOUS_TIMEOUT_S else lost_since
            reason = first_line(error)
            if now - lost_since > _RENDEZVOUS_TIMEOUT_S:
                timeout = f"{_RENDEZVOUS_TIMEOUT_S:.0f} s"
                message = f"the nodes did not connect at {node.host}:{node.port} within {timeout}: {reason}"
                return Outcome(RETRYABLE, message)
            print(f"worldsize: waiting for {node.host}:{node.port} ({reason})", file=sys.stderr, flush=True)
            time.sleep(2)


def _on_the_route(node: Node) -> Node:
    """The node with its address on the route to the hosts in WORLDSIZE_PEERS; gloo and NCCL get its interface."""
    for peer in filter(None, os.environ.get("WORLDSIZE_PEERS", "").split(",")):
        found = route.to(peer)
        if found is None or found[0].partition(":")[0] == "lo":
            continue
        interface, address = found
        if not interface:
            return _at(node, address)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)
        chosen = os.environ["GLOO_SOCKET_IFNAME"]
        print(f"worldsize: {socket.gethostname()} uses the interface {chosen}; {peer} is reached by {interface}", flush=True)
        return _at(node, address)
    return node


def _at(node: Node, address: str) -> Node:
    return node if "WORLDSIZE_ADDRESS" in os.environ else replace(node, address=address)


def _once(argv: Sequence[str], node: Node) -> Outcome:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with temporary_folder() as logs:
        settings: dict[str, Any] = {
            "min_nodes": node.nodes[0],
            "max_nodes": node.nodes[1],
            "run_id": node.run_id,
            "rdzv_endpoint": f"{node.host}:{node.port}",
            "rdzv_configs": {"is_host": node.is_host, "join_timeout": int(_RENDEZVOUS_TIMEOUT_S)},
            "local_addr": node.address,
            "max_restarts": _MAX_RESTARTS,
        }
        try:
            with failed_workers.named():
                run_elastic(argv, node.procs, logs, settings, tee=True)
        except ChildFailedError as error:
            return _retryable_if_stopped(
                cause({rank: f.exitcode for rank, f in error.failures.items()}, reports(logs), time.time())
            )
        # Non-retryable failures exit with 0 (see `worker_exit_code`): torch's agent restarts every process that fails.
        permanent = [outcome for _, outcome in reports(logs) if outcome.code in PERMANENT]
        return permanent[0] if permanent else Outcome(SUCCESS)


def _retryable_if_stopped(outcome: Outcome) -> Outcome:
    return Outcome(RETRYABLE, outcome.message) if outcome.code == Stopped.exit_code else outcome


def worker_exit_code(code: int) -> int:
    """The exit code of a worker: under an agent, 0 for a non-retryable failure, which the worker has reported."""
    return SUCCESS if _under_agent() and code in PERMANENT else code


def retried(code: int) -> bool:
    """Whether an agent restarts a process with this exit code, without a message of its own."""
    return _under_agent() and code not in PERMANENT


def _under_agent() -> bool:
    # The agent sets AGENT for itself too; only its workers have both.
    return AGENT in os.environ and LOCAL_LAUNCH in os.environ
