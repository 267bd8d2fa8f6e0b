"""SIGTERM and Ctrl-C: the first asks for a stop at the next step, a second one leaves at once."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1


class StopFlag:
    """Set by the first SIGTERM, SIGINT or SIGHUP that arrives after `install`."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def install(self) -> None:
        """Take over the signals of this process."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._handle)

    def ignore_more(self) -> None:
        """The run is over: a signal that still arrives must not change its exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            # No clean-up: the user does not want to wait, and the checkpoints on disk are whole.
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        if os.environ.get("RANK", "0") == "0":
            print("\nstopping after this step; once more leaves at once", file=sys.stderr, flush=True)


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the launcher dies, so that kill -9 on it leaves no orphans. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
