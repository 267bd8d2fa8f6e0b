"""What Linux tells about another process. Elsewhere nothing is known, and the process counts as busy."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class State:
    """``letter`` as in ``ps``: R, S, D, T (stopped), t (traced), Z (ended); ``cpu_s`` of all its threads so far."""

    letter: str
    cpu_s: float

    @property
    def stopped(self) -> bool:
        return self.letter in "Tt"


def state_of(pid: int) -> State | None:
    """The state of a process; None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return State(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS)
    return None


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    state = state_of(pid)
    return state is None or state.letter != "Z"
