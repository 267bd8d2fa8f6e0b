"""How a process reports that it failed: once for all ranks, to its launcher and to the user."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from worldsize.config.wording import printable_lines
from worldsize.distributed.rank import LAUNCHED, LOCAL_LAUNCH, LOCAL_RANKS
from worldsize.errors import INTERNAL_ERROR
from worldsize.launch.agent import retried, worker_exit_code
from worldsize.launch.local import report

_LEAVE_S = 10.0


def fail(message: str, code: int) -> int:
    """Report a failure that all ranks agree on; one rank per machine prints it. Returns the exit code."""
    reported = report(message, code)
    local_rank = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
    if message and local_rank == "0" and (_prints(code) or not reported):
        _print(message)
    if not _left_group():
        _exit_now(code)
    return worker_exit_code(code)


def _left_group() -> bool:
    """Leave torch's process group, if this process is in one. Returns whether that succeeded within `_LEAVE_S` seconds.

    Otherwise Python aborts ("terminate called without an active exception") if it exits while a thread of gloo releases
    the tensors of the last message. All ranks fail together, so none waits for another.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return True
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_S)
    return not leaving.is_alive()


def fail_alone(message: str, code: int) -> int:
    """Report a failure of this process only: it prints, whatever its rank. Returns the exit code if there are no others."""
    reported = report(message, code)
    if _prints(code) or not reported:
        _print(message)
    if os.environ.get("WORLD_SIZE", "1") != "1" or any(name in os.environ for name in LAUNCHED):
        # A regular exit would wait for the other ranks, which wait for this one.
        _exit_now(code)
    return worker_exit_code(code)


def _print(message: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(f"worldsize: {printable_lines(message)}", file=sys.stderr)


def _exit_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(worker_exit_code(code))


def fail_internally(trace: str) -> int:
    """Report an unexpected exception of this process."""
    return fail_alone(f"internal error in worldsize or in a library; please report it:\n{trace}", INTERNAL_ERROR)


def _prints(code: int) -> bool:
    """Whether this process prints its failure, and not the launcher that started it."""
    return LOCAL_LAUNCH not in os.environ or retried(code)
