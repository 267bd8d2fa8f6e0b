"""One node's part of a job on several: starts this node's processes, and starts them again with those of the other nodes.

Kubeflow's operators tell each pod its place by PET_* variables, as they do for torchrun. This is torchrun's elastic agent
with three differences: what must not be retried ends the job at once and with its own exit code, a rendezvous whose host
was moved to another machine is joined again, and lines begin with the rank that wrote them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldsize.errors import PERMANENT, Stopped, Unmet, UserError
from worldsize.launch.answers import first_line
from worldsize.launch.local import Outcome, cause, elastic, reports
from worldsize.place import LOCAL_LAUNCH

AGENT = "WORLDSIZE_AGENT"
# An operator takes 128 and more for "try again", less for "give up".
TRY_AGAIN = 128 + signal.SIGTERM
_PATIENCE_S = 1800.0  # for a node that is being started elsewhere: its image may have to be fetched
_RESTARTS = 100  # by the agent; a run that gets no further gives up by itself, and much earlier
_TERMINATION_LOG = Path("/dev/termination-log")


@dataclass(frozen=True)
class Node:
    """This node's place in a job.

    ``nodes`` is (fewest, most); ``host`` and ``port`` are where the nodes meet, ``hosts`` whether that is here;
    ``address`` is where the others reach this node.
    """

    run_id: str
    nodes: tuple[int, int]
    procs: int
    host: str
    port: int
    hosts: bool
    address: str


def discover(run_id: str, env: Mapping[str, str] = os.environ) -> Node:
    """This node's place, from the variables that the operators set (as torchrun reads them).

    Raises:
        UserError: a variable is missing or is not what it should be.
    """
    try:
        fewest, _, most = env.get("PET_NNODES", "1").partition(":")
        endpoint = env.get("PET_RDZV_ENDPOINT") or f"{env['PET_MASTER_ADDR']}:{env['PET_MASTER_PORT']}"
        host, _, port = endpoint.rpartition(":")
        rank = env.get("PET_NODE_RANK")
        here = socket.gethostname()
        return Node(
            run_id,
            (int(fewest), int(most or fewest)),
            int(env["PET_NPROC_PER_NODE"]),
            host,
            int(port),
            int(rank) == 0 if rank is not None else here == host.split(".")[0],
            env.get("POD_IP", here),
        )
    except KeyError as missing:
        raise UserError(f"{missing.args[0]} is not set: `worldsize agent` is started by a cluster's operator") from None
    except ValueError as error:
        raise UserError(f"the PET_* variables are not what torchrun would read: {error}") from None


def run(argv: Sequence[str], node: Node) -> Outcome:
    """Run ``worldsize ARGV`` as ``node.procs`` processes here, together with those of the other nodes, to the end.

    Returns:
        0; an exit code below 128 and the first failure's message where trying again is useless; 69 where the other nodes
        did not come; `TRY_AGAIN` where this node was asked to leave.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    # The elastic agent takes signals over only once its workers run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TRY_AGAIN))
    os.environ[AGENT] = "1"
    # Else the ranks meet in the agents' store under a number of restarts that agents may count differently.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    lost_since: float | None = None
    while True:
        begun = time.monotonic()
        try:
            return _once(argv, node)
        except SignalException as interrupt:
            return Outcome(128 + interrupt.sigval)
        except (RendezvousError, DistError) as error:
            now = time.monotonic()
            lost_since = begun if lost_since is None or now - begun > _PATIENCE_S else lost_since
            what = first_line(error)
            if now - lost_since > _PATIENCE_S:
                message = f"the nodes did not meet at {node.host}:{node.port} within {_PATIENCE_S:.0f} s: {what}"
                return Outcome(Unmet.exit_code, message)
            print(f"worldsize: waiting for {node.host}:{node.port} ({what})", file=sys.stderr, flush=True)
            time.sleep(2)


def _once(argv: Sequence[str], node: Node) -> Outcome:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="worldsize-") as folder:
        logs = Path(folder)
        settings: dict[str, Any] = {
            "min_nodes": node.nodes[0],
            "max_nodes": node.nodes[1],
            "run_id": node.run_id,
            "rdzv_endpoint": f"{node.host}:{node.port}",
            "rdzv_configs": {"is_host": node.hosts, "join_timeout": int(_PATIENCE_S)},
            "local_addr": node.address,
            "max_restarts": _RESTARTS,
        }
        try:
            elastic(argv, node.procs, logs, settings, tee=True)
        except ChildFailedError as error:
            return _try_again_if_stopped(
                cause({rank: f.exitcode for rank, f in error.failures.items()}, reports(logs), time.time())
            )
        # Those that must not be retried ended well for torch's agent, which starts whatever fails again.
        final = [told for _, told in reports(logs) if told.code in PERMANENT]
        return final[0] if final else Outcome(0)


def _try_again_if_stopped(outcome: Outcome) -> Outcome:
    return Outcome(TRY_AGAIN, outcome.message) if outcome.code == Stopped.exit_code else outcome


def worker_exit_code(code: int) -> int:
    """What a process under an agent ends with: 0 instead of what must not be retried, which it has reported."""
    return 0 if _under_agent() and code in PERMANENT else code


def retried(code: int) -> bool:
    """Whether an agent starts a process again that ends so, and says nothing about it."""
    return _under_agent() and code not in PERMANENT


def _under_agent() -> bool:
    # The agent itself has the first of the two as well.
    return AGENT in os.environ and LOCAL_LAUNCH in os.environ


def leave_last_words(message: str) -> None:
    """Put the message where Kubernetes shows it as the reason for the container's end."""
    if message:
        with suppress(OSError):
            _TERMINATION_LOG.write_text(message[:4000])
