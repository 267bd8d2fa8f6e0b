"""The program with the arguments GRACE COMMAND ...: runs a command on a host as long as its launcher lives.

The launcher, on another machine, writes lines to this process's stdin:

- ``recipe N`` followed by N bytes: the recipe, which replaces the word ``{recipe}`` of the command by the path of a file,
- ``beat``, at least every few seconds,
- ``stop``: let the command save and end.

If stdin ends, or no line arrives for 30 seconds, the command is stopped too: the launcher, its machine or the network is
gone. After GRACE seconds everything that the command has started is killed. Exits with the command's exit code.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from worldsize.distributed.stop_signals import SIGNALS, end_with_parent, temporary_folder, undo_inherited
from worldsize.errors import SIGNAL_BASE
from worldsize.launch.children import children

BEAT_S = 5.0
SILENCE_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36
_RECIPE = "{recipe}"


class _Input:
    """The launcher's lines."""

    def __init__(self) -> None:
        self._rest = b""
        self.heard = time.monotonic()
        self.ended = False

    def lines(self, timeout: float) -> list[str]:
        """The complete lines that arrive within ``timeout`` seconds, at least one if any."""
        if self.ended or not select.select([0], [], [], timeout)[0]:
            time.sleep(timeout if self.ended else 0)
            return []
        content = os.read(0, 65536)
        self.ended = not content
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [line.decode() for line in lines]

    def recipe(self) -> bytes:
        """The recipe, which is the first thing that the launcher sends.

        Raises:
            SystemExit: it ends or falls silent before.
        """
        content = b""
        while True:
            head, newline, body = content.partition(b"\n")
            if newline and len(body) >= int(head.split()[1]):
                size = int(head.split()[1])
                self._rest = body[size:]
                return body[:size]
            if not select.select([0], [], [], SILENCE_S)[0] or not (more := os.read(0, 65536)):
                raise SystemExit(SIGNAL_BASE + signal.SIGTERM)
            content += more


def main(argv: Sequence[str]) -> int:
    """Run the command until it ends, or the launcher is gone. Returns the exit code."""
    grace, command = float(argv[0]), list(argv[1:])
    # What the command leaves behind becomes a child of this process, which can then end it.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    undo_inherited()
    signals: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda received, _: signals.append(received))
    source = _Input()
    with temporary_folder() as folder:
        recipe = Path(folder, "recipe.yaml")
        recipe.write_bytes(source.recipe())
        words = [str(recipe) if word == _RECIPE else word for word in command]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent)
        try:
            return _watch(process, source, signals, grace)
        finally:
            _kill_descendants()


def _watch(process: subprocess.Popen[bytes], source: _Input, signals: list[int], grace: float) -> int:
    """Wait for the command's end; stop it when asked to, or when the launcher is gone."""
    stopped_at: float | None = None
    while process.poll() is None:
        lines = source.lines(0.2)
        silent = time.monotonic() - source.heard > SILENCE_S
        if stopped_at is None and ("stop" in lines or signals or source.ended or silent):
            stopped_at = time.monotonic()
            if source.ended or silent:
                why = "is gone" if source.ended else f"was silent for {SILENCE_S:g} s"
                _say(f"the launcher {why}; saving and stopping")
            process.terminate()
        if stopped_at is not None and time.monotonic() - stopped_at > grace:
            _say(f"not ended {grace:.0f} s after it was asked to stop; killed")
            process.kill()
            process.wait()
    code = process.returncode
    return SIGNAL_BASE - code if code < 0 else code


def _say(text: str) -> None:
    with suppress(OSError):  # nobody may be listening
        print(f"worldsize: {text}", file=sys.stderr, flush=True)


def _kill_descendants() -> None:
    """Kill what the command has left behind, until nothing is."""
    while left := children(os.getpid()):
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
