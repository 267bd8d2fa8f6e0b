"""SIGTERM and Ctrl-C: the first asks for a stop at the next step, a second one leaves at once."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from worldsize.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_ECHO_S = 2.0


class StopFlag:
    """Set by the first signal that arrives while there is something to save (between `arm` and `disarm`).

    Args:
        launched: whether a launcher passes signals on. A signal to the whole process tree then arrives twice, so what
            follows the first within two seconds is taken for its echo.
        speak: whether this process tells the user.
    """

    def __init__(self, launched: bool = False, speak: bool = True) -> None:
        self._launched = launched
        self._speak = speak
        self._armed = False
        self._since: float | None = None

    def __bool__(self) -> bool:
        return self._since is not None

    def install(self) -> None:
        """Take over the signals of this process, but for those that it was started to ignore (``nohup``)."""
        # Python calls handlers between two of its instructions, and a backward pass is one that may take minutes. What
        # a signal writes to a pipe is seen at once.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        ours = handled()
        threading.Thread(target=self._watch, args=(reader, ours), daemon=True).start()
        for number in ours:
            signal.signal(number, lambda *_: None)

    def _watch(self, reader: int, ours: Collection[int]) -> None:
        while numbers := os.read(reader, 64):
            # Others' signals come here too, such as those by which torch's DataLoader learns that a worker has ended.
            for number in filter(ours.__contains__, numbers):
                self._handle(number)

    def arm(self) -> None:
        """From here on the first signal does not end the process."""
        self._armed = True

    def disarm(self) -> None:
        """All is saved: a signal that still arrives must not change the exit code."""
        for number in handled():
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int) -> None:
        now = time.monotonic()
        if not self._armed or (self._since is not None and not (self._launched and now - self._since < _ECHO_S)):
            # No clean-up: nothing is half done that matters, and the checkpoints on disk are whole.
            os._exit(128 + number)
        if self._since is None:
            self._since = now
            if self._speak:
                with suppress(OSError):  # the terminal may be what has just gone
                    os.write(2, b"\nstopping after this step; once more leaves at once\n")


@contextmanager
def ends_at_once(advice: str, first: Callable[[], None] | None = None) -> Iterator[None]:
    """Inside, a signal ends the process at once: for work whose files are whole at any moment, so nothing is to tidy up.

    Args:
        advice: what the user is told.
        first: is called before, by the signal's handler.
    """

    def stop(number: int, frame: object) -> None:
        # An exception from here could leave a lock locked that other threads wait for.
        if first is not None:
            first()
        show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # a bar hides it
        with suppress(OSError):
            os.write(2, f"{show_cursor}\nworldsize: stopped; {advice}\n".encode())
        os._exit(Stopped.exit_code)

    before = {number: signal.signal(number, stop) for number in handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def handled() -> list[signal.Signals]:
    """The signals that stop a run, without those that are ignored already."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the launcher dies, so that kill -9 on it leaves no orphans. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
