"""SIGTERM, SIGUSR1 and Ctrl-C: the first signal stops the run after the current step, the second exits immediately."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from worldsize.errors import SIGNAL_BASE, Stopped

# SIGUSR1 is what batch scripts often ask a scheduler for (`sbatch --signal=USR1@120`), and what mpirun passes on without
# ending the job.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1
ECHO_S = 2.0  # a signal to the process tree arrives twice
_received: list[int] = []  # signals within `interruptible`
_temporary: list[tuple[int, Path]] = []  # folders to remove when a signal ends this process, with the ids of their processes


class StopFlag:
    """Set by the first signal that arrives while there is something to save (between `arm` and `disarm`).

    Args:
        launched: whether a launcher forwards signals. A signal to the process tree then arrives twice, so signals within
            two seconds of the first are treated as duplicates.
        speak: whether this process prints a message for the user.
    """

    def __init__(self, launched: bool = False, speak: bool = True) -> None:
        self._launched = launched
        self._speak = speak
        self._armed = False
        self._first_at: float | None = None

    def __bool__(self) -> bool:
        return self._first_at is not None

    def install(self) -> None:
        """Handle this process's stop signals, except those it was started to ignore (``nohup``)."""
        # Python runs signal handlers only between bytecode instructions, and a backward pass is a single instruction
        # that can take minutes. The wakeup pipe is written immediately.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        ours = handled()
        threading.Thread(target=self._watch, args=(reader, ours), daemon=True).start()
        for number in ours:
            signal.signal(number, lambda *_: None)

    def _watch(self, reader: int, ours: Collection[int]) -> None:
        while numbers := os.read(reader, 64):
            # Signals of other handlers arrive here too, such as SIGCHLD, which torch's DataLoader uses.
            for number in filter(ours.__contains__, numbers):
                self._handle(number)

    def arm(self) -> None:
        """From now on, the first signal requests a stop instead of ending the process."""
        self._armed = True

    def disarm(self) -> None:
        """Ignore further signals: everything is saved, and a late signal must not change the exit code."""
        for number in handled():
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int) -> None:
        now = time.monotonic()
        if not self._armed or (self._first_at is not None and not (self._launched and now - self._first_at < ECHO_S)):
            # No cleanup needed: the checkpoints on disk are complete.
            os._exit(128 + number)
        if self._first_at is None:
            self._first_at = now
            if self._speak:
                with suppress(OSError):  # the terminal may be gone
                    os.write(2, b"\nstopping after this step; send the signal again to exit immediately\n")


@contextmanager
def ends_at_once(advice: str, first: Callable[[], None] | None = None, continues: bool = False) -> Iterator[None]:
    """Within this context, a signal ends the process immediately, with 128 plus its number.

    For work that leaves complete files at any moment, so no cleanup is needed but that of `temporary_folder`.

    Args:
        advice: printed for the user.
        first: called by the signal handler before it exits.
        continues: the same command continues the work: end with the code of a training that is saved.
    """

    def stop(number: int, frame: object) -> None:
        # Raising an exception here could leave a lock held that other threads wait for.
        if first is not None:
            first()
        _remove_temporary()
        show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        with suppress(OSError):
            os.write(2, f"{show_cursor}\nworldsize: stopped; {advice}\n".encode())
        os._exit(Stopped.exit_code if continues else SIGNAL_BASE + number)

    with handled_by(stop):
        yield


class Interrupted(KeyboardInterrupt):
    """A signal that stops a run has arrived within `interruptible`; the message is for the user."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Within this context, a signal raises `Interrupted`, so that `with` blocks clean up.

    For work that starts other processes, which must end with it. Signals after the first do not interrupt the cleanup, which
    would leave folders behind; see `hurried`.
    """
    _received.clear()

    def interrupt(number: int, frame: object) -> None:
        _received.append(number)
        if len(_received) == 1:
            raise Interrupted(message, number)

    with handled_by(interrupt):
        yield


def hurried() -> bool:
    """Whether another signal has arrived since `interruptible` raised: what is still waited for should end at once."""
    return len(_received) > 1


@contextmanager
def nothing_was(done: str) -> Iterator[None]:
    """Within this context, Ctrl-C raises `Interrupted`, which says that nothing was ``done``."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; nothing was {done}", signal.SIGINT) from None


@contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """Within this context, Ctrl-C only adds to the list: for steps that must not be left half done."""
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield held
        return
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def temporary_folder(prefix: str = "worldsize-") -> Iterator[Path]:
    """A new folder, removed with its content at the end of this context, and by a signal that ends the process."""
    with _removed_by_signals(), tempfile.TemporaryDirectory(prefix=prefix) as name:
        entry = (os.getpid(), Path(name))
        _temporary.append(entry)
        try:
            yield entry[1]
        finally:
            _temporary.remove(entry)


@contextmanager
def _removed_by_signals() -> Iterator[None]:
    """Within this context, a signal that nobody handles removes the temporary folders before it ends the process."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return

    def end(number: int, frame: object) -> None:
        _remove_temporary()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    ours = [number for number in handled() if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)


def _remove_temporary() -> None:
    """Remove the temporary folders of this process, but not those of the process that it was forked from."""
    for owner, folder in _temporary:
        if owner == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within this context, ``handler`` handles the signals that stop a run; afterwards the handlers are those of before."""
    before = {number: signal.signal(number, handler) for number in handled()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def undo_inherited() -> None:
    """At the start of a program: receive every signal, and the exit codes of children, whatever its parent had set.

    A process that starts with SIGCHLD ignored learns no exit code: its children seem to end with 0, and failures to be none.
    One that starts with signals blocked cannot be stopped. Signals that are ignored stay so (``nohup``).

    The first process of a container (PID 1) gets only the signals that it handles: the others are lost. Until a command
    handles them itself, they end the process, as they end any other.
    """
    if threading.current_thread() is not threading.main_thread():  # of a program that calls a command; it may not do this
        return
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if os.getpid() == 1:
        for number in handled():
            if signal.getsignal(number) is signal.SIG_DFL:
                # It may arrive during an import, where an exception could be caught.
                signal.signal(number, lambda received, _: os._exit(SIGNAL_BASE + received))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def handled() -> list[signal.Signals]:
    """The signals that stop a run, except those that are already ignored."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher dies, so that kill -9 on it leaves no orphans (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
