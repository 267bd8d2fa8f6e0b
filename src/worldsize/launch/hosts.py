"""``python -m worldsize.launch.hosts HOSTFILE PORT COMMAND ...``: runs the command once every host can be reached.

For mpirun, which fails at once where a host has no name yet. A worker that was evicted or deleted is replaced on a node that
may have to fetch the image first, and meanwhile the job would use up its retries. One that failed is not replaced, and the
others keep their devices for as long as this waits.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from worldsize.errors import Unmet, UserError, WorldsizeError
from worldsize.launch.answers import first_line

_PATIENCE_S = 300.0
_CONNECT_S = 5.0


def named_in(hostfile: Path) -> list[str]:
    """The hosts of an MPI hostfile: the first word of each line.

    Raises:
        UserError: it cannot be read.
    """
    try:
        lines = hostfile.read_text().splitlines()
    except OSError as error:
        raise UserError(
            f"{hostfile} cannot be read ({error.strerror}): the operator mounts it in an MPIJob's pods"
        ) from None
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def wait_for(hosts: Sequence[str], port: int, patience_s: float = _PATIENCE_S) -> None:
    """Return when each host has taken a connection; say on stderr which one is waited for.

    Raises:
        Unmet: one did not within ``patience_s`` seconds.
    """
    until = time.monotonic() + patience_s
    for host in hosts:
        told = False
        while why := _refusal(host, port):
            if time.monotonic() > until:
                raise Unmet(f"{host}:{port} was not there within {patience_s:.0f} s: {why}")
            if not told:
                print(f"worldsize: waiting for {host}:{port} ({why})", file=sys.stderr, flush=True)
                told = True
            time.sleep(1)


def _refusal(host: str, port: int) -> str:
    """Why it takes no connection; empty where it does."""
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        return first_line(error)
    return ""


def main(argv: Sequence[str]) -> None:
    """Become the command.

    Raises:
        SystemExit: there is no use in it.
    """
    # The first process of a container dies of no signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    hostfile, port, *command = argv
    try:
        wait_for(named_in(Path(hostfile)), int(port))
    except WorldsizeError as error:
        print(f"worldsize: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
