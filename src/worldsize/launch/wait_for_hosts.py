"""The program with the arguments HOSTFILE PORT COMMAND ...: runs the command once every host is reachable.

mpirun fails immediately if a host name does not resolve yet. A lost worker may be replaced on a node that first has to pull
the container image; without waiting, the job would use up its retries meanwhile. A worker that failed is not replaced, and
the other workers keep their devices while this waits; hence the time limit.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from worldsize.distributed.stop_signals import undo_inherited
from worldsize.errors import SIGNAL_BASE, PeersUnreachable, UserError, WorldsizeError, first_line

_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 5.0


def read_hosts(hostfile: Path) -> list[str]:
    """The hosts of an MPI hostfile: the first word of each line.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        lines = hostfile.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{hostfile} cannot be read ({error.strerror}): pass the path of mpirun's hostfile") from None
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def wait_for(hosts: Sequence[str], port: int, timeout_s: float = _TIMEOUT_S) -> None:
    """Return when every host has accepted a connection; print the one being waited for to stderr.

    Raises:
        PeersUnreachable: a host did not within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    for host in hosts:
        announced = False
        while reason := _failure(host, port):
            if time.monotonic() > deadline:
                raise PeersUnreachable(f"{host}:{port} was not reachable within {timeout_s:.0f} s: {reason}")
            if not announced:
                print(f"worldsize: waiting for {host}:{port} ({reason})", file=sys.stderr, flush=True)
                announced = True
            time.sleep(1)


def _failure(host: str, port: int) -> str:
    """Why the host accepts no connection; empty if it does."""
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return first_line(error)
    return ""


def main(argv: Sequence[str]) -> None:
    """Wait, then replace this process with the command.

    Raises:
        SystemExit: a host is not reachable, the hostfile cannot be read, or SIGTERM arrived.
    """
    undo_inherited()
    # As a container's first process (PID 1), it gets only the signals that it handles.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(SIGNAL_BASE + signal.SIGTERM))
    hostfile, port, *command = argv
    try:
        wait_for(read_hosts(Path(hostfile)), int(port))
    except WorldsizeError as error:
        print(f"worldsize: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    os.execvp(command[0], command)
