"""The command that does the work of a call from Python: its output, its end, and Ctrl-C on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, TextIO

from worldsize.distributed.stop_signals import end_with_parent


@dataclass(frozen=True)
class End:
    """How a command ended.

    Attributes:
        code: its exit code; minus the number of the signal that killed it. None: it is lost, see `_code`.
        said: its last lines on stderr.
        interrupted: whether Ctrl-C asked it to stop.
    """

    code: int | None
    said: Sequence[str]
    interrupted: bool


def follow(command: list[str], environment: Mapping[str, str], quiet: bool) -> End:
    """Run a command.

    It has a session of its own: Ctrl-C reaches it once, through this process, as a request to save and stop. A second Ctrl-C
    ends it at once. If this process is killed, its thread ends, or another exception is raised, it saves and stops, too.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    text: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
    with _exit_codes_kept():
        process = subprocess.Popen(command, env=dict(environment), preexec_fn=end_with_parent, **text, **pipes)
        assert process.stdout is not None and process.stderr is not None
        said: deque[str] = deque(maxlen=100)
        errors_copied = threading.Thread(target=_copy_errors, args=(process.stderr, quiet, said), daemon=True)
        errors_copied.start()
        interrupted = False
        try:
            with process.stdout:
                try:
                    _copy(process.stdout, sys.stdout, quiet)
                except KeyboardInterrupt:
                    interrupted = True
                    process.terminate()
                    _copy(process.stdout, sys.stdout, quiet)
                except BaseException:
                    process.terminate()
                    _copy(process.stdout, sys.stdout, quiet=True)  # printing is what failed
                    process.wait()
                    raise
            code = _code(process)
        finally:
            process.kill()  # does nothing if it has ended; processes that it started end with it
        errors_copied.join()
        return End(code, list(said), interrupted)


@contextmanager
def _exit_codes_kept() -> Iterator[None]:
    """Within this context, SIGCHLD is not ignored: otherwise the kernel tells no exit code.

    Only the main thread may change that; in others, an exit code may get lost.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _code(process: subprocess.Popen[str]) -> int | None:
    """Wait for the process's end and return its exit code.

    None: the kernel told it to nobody, because this program ignores SIGCHLD, or to code of the program that waits for all
    children. `subprocess` says 0 then.
    """
    if process.returncode is None and hasattr(os, "waitid"):
        with suppress(ChildProcessError):
            end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            process.wait()
            if end is not None:
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    return process.wait() or None


def _copy_errors(source: IO[str], quiet: bool, said: deque[str]) -> None:
    """Print what the command writes to stderr until it ends."""
    with source:
        try:
            _copy(source, sys.stderr, quiet, said)
        finally:
            _copy(source, sys.stderr, True, said)  # if printing failed: a full pipe would stop the command


def _copy(source: IO[str], target: TextIO, quiet: bool, said: deque[str] | None = None) -> None:
    """Print a stream to one of this process, which a notebook shows; add its lines to ``said``, without empty ones.

    If nobody reads what is printed any more (``| head``), the stream is still read to its end: the run continues.
    """
    for line in source:
        if said is not None and line.strip():
            said.append(line.strip())
        if quiet:
            continue
        try:
            _print(line, target)
        except (OSError, ValueError):  # its reader left, or it is closed
            quiet = True


def _print(line: str, target: TextIO) -> None:
    """Print a line, with escapes for what the stream has no characters for, such as ``\\u2603``."""
    try:
        print(line, end="", file=target, flush=True)
    except UnicodeEncodeError:
        encoding = getattr(target, "encoding", None) or "ascii"
        print(line.encode(encoding, "backslashreplace").decode(encoding), end="", file=target, flush=True)
