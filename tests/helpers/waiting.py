"""Waiting for a condition: what tests do instead of waiting for a fixed time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

Found = TypeVar("Found")


class Running(Protocol):
    """What a wait needs of a `subprocess.Popen` or `processes.Forked`."""

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[Any, Any]: ...


def until(
    condition: Callable[[], Found],
    what: str,
    seconds: float = 120,
    *,
    running: Running | None = None,
    every: float = 0.02,
) -> Found:
    """Wait until ``condition()`` is true and return what it returned.

    Args:
        what: the condition in words, for the message if it does not come true.
        seconds: ends a wait that hangs; no test may depend on its value.
        running: a process that must not end before; if it does, the message has its output.
        every: seconds between two looks.

    Raises:
        AssertionError: ``running`` has ended, or the time is up.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        late = time.monotonic() > deadline
        if late or (running is not None and running.poll() is not None):
            why = f"not within {seconds:g} s" if late else f"the process ended before, with exit code {running.returncode}"
            raise AssertionError(f"{what}: {why}{_output(running)}")
        time.sleep(every)
    return found


def all_end(pids: Iterable[int]) -> None:
    """Wait until none of these processes exists."""
    pids = list(pids)
    until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], f"processes {pids} have ended")


def _output(process: Running | None) -> str:
    """What a process has printed; ends it first, because its output ends with it."""
    if process is None:
        return ""
    process.kill()
    with suppress(subprocess.TimeoutExpired, ValueError):  # its children may keep the pipe open; the test may have closed it
        texts = process.communicate(timeout=20)
        return "".join(f"\n{text if isinstance(text, str) else text.decode()}" for text in texts if text)
    return ""
