"""A training in a child process; it ends when this process is interrupted, see `interruptible`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from worldsize.config import live_output
from worldsize.distributed.stop_signals import SIGNALS, end_with_parent, hurried
from worldsize.errors import SIGNAL_BASE, SUCCESS, Stopped, WorldsizeError
from worldsize.launch import children, entry_point, local

_POLL_S = 0.2
_LOG_EVERY_S = 15.0
_ENDING_S = 10.0  # for ending at once
# What happened to a training with this exit code. After saving, it does not tell which signal it was.
_STOPPED = {Stopped.exit_code: "stopped"} | {SIGNAL_BASE + number: f"stopped by {number.name}" for number in SIGNALS}


class ComputationFailed(WorldsizeError):
    """A training failed or was stopped; the exit code is its own, and so is the message if it has one."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def train(words: Sequence[str], metrics: Path, procs: int, until: int) -> None:
    """Run ``worldsize train WORDS`` with ``procs`` processes to step ``until``, or to its end if that is earlier.

    Args:
        metrics: metrics.jsonl of its run.

    Raises:
        ComputationFailed: it failed, diverged, or was stopped or killed before.
    """
    words = ["train", *words, "--procs", str(procs), "--stop-after", str(until)]
    code, said = run(words, metrics, until)
    reached = last_step(metrics)
    # With --stop-after a training ends as one that a signal stopped.
    if code == SUCCESS or (code == Stopped.exit_code and reached >= until):
        return
    if code < 0:
        message = "\n".join(filter(None, (local.death(code, "the training"), said)))
    else:
        message = said.removeprefix("worldsize: ") or f"worldsize {' '.join(words)} failed"
    code = local.as_in_a_shell(code)
    if code in _STOPPED:
        where = f"after step {reached:,} of {until:,}" if reached else "before its first step"
        message = f"the training was {_STOPPED[code]} {where}: there is no verdict, so run the same command again"
        # metrics.jsonl may lack steps because the disk is full.
        message = "\n".join([message, *(line for line in said.splitlines() if line.startswith("warning: "))])
    raise ComputationFailed(message, code)


def run(words: Sequence[str], metrics: Path, until: int) -> tuple[int, str]:
    """Run ``worldsize WORDS`` and show its progress on stderr: a bar on a terminal, otherwise a line every 15 s.

    Args:
        metrics: metrics.jsonl of its run, which tells the step.
        until: its last step.

    Returns:
        Its exit code and what it wrote to stderr.
    """
    with _captured() as log:
        process = _start([*entry_point.command(sys.executable), *words], stdout=subprocess.DEVNULL, stderr=log)
        try:
            _follow(process, metrics, until)
        except BaseException:
            _stop(process)
            raise
        log.seek(0)
        return process.returncode, log.read().strip()


def finished(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that trains, without progress, and return its output.

    If this process is interrupted, see `interruptible`, or killed, the command ends, too.

    Args:
        options: of `subprocess.Popen`.
    """
    with _captured() as out, _captured() as log:
        process = _start(command, stdout=out, stderr=log, **options)
        try:
            process.wait()
        except BaseException:
            _stop(process)
            raise
        out.seek(0)
        log.seek(0)
        return subprocess.CompletedProcess(process.args, process.returncode, out.read(), log.read())


def _captured() -> IO[str]:
    """A file for what a process writes, which may have bytes that are not UTF-8, such as in names of files."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace")


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start it in a session of its own: Ctrl-C reaches it through this process only. If this one is killed, it stops."""
    return subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **options)


def _follow(process: subprocess.Popen[bytes], metrics: Path, until: int) -> None:
    console = Console(stderr=True)
    live = live_output.possible(console)
    columns = (
        TextColumn("  step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeRemainingColumn(compact=True),
    )
    told = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not live) as bar:
        task = bar.add_task("", total=until)
        while process.poll() is None:
            time.sleep(_POLL_S)
            bar.update(task, completed=last_step(metrics))
            if not live and time.monotonic() - told >= _LOG_EVERY_S:
                told = time.monotonic()
                console.print(f"  step {last_step(metrics):,} of {until:,}", highlight=False)


def last_step(metrics: Path) -> int:
    """The step of the newest complete line of ``metrics``, a run's metrics.jsonl; 0 if there is none yet."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 2**16))
            lines = file.read().split(b"\n")[:-1]
        return max((json.loads(line).get("step", 0) for line in lines[-1:]), default=0)
    except (OSError, ValueError):
        return 0


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the process end after its step; if this process is interrupted once more, at once.

    Returns when it has ended: what it still wrote would remain in the folder that is deleted next.
    """
    process.terminate()
    try:
        while not hurried() and process.poll() is None:
            time.sleep(_POLL_S)
        deadline = time.monotonic() + _ENDING_S
        while process.poll() is None and time.monotonic() < deadline:
            # A launcher passes the second signal on, but takes one soon after the first for the same.
            process.terminate()
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            workers = children.children(process.pid)
            process.kill()
            process.wait()
            children.end(workers, signal.SIGKILL)
