"""A training in a child process, with progress; it ends when this process is interrupted, see `interruptible`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from worldsize.config import live_output
from worldsize.launch import entry_point

_POLL_S = 0.2
_LOG_EVERY_S = 15.0


def run(words: Sequence[str], metrics: Path, until: int) -> tuple[int, str]:
    """Run ``worldsize WORDS`` and show its progress on stderr: a bar on a terminal, otherwise a line every 15 s.

    Args:
        metrics: metrics.jsonl of its run, which tells the step.
        until: its last step.

    Returns:
        Its exit code and what it wrote to stderr.
    """
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own: Ctrl-C reaches it through this process only.
        process = subprocess.Popen(
            [*entry_point.command(sys.executable), *words], stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )
        try:
            _follow(process, metrics, until)
        except BaseException:
            _stop(process)
            raise
        log.seek(0)
        return process.returncode, log.read().strip()


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
            bar.update(task, completed=_last_step(metrics))
            if not live and time.monotonic() - told >= _LOG_EVERY_S:
                told = time.monotonic()
                console.print(f"  step {_last_step(metrics):,} of {until:,}", highlight=False)


def _last_step(metrics: Path) -> int:
    """The step of the newest complete line; 0 if there is none yet."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 2**16))
            lines = file.read().split(b"\n")[:-1]
        return max((json.loads(line).get("step", 0) for line in lines[-1:]), default=0)
    except (OSError, ValueError):
        return 0


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the process end after its step; if this process is interrupted once more, at once."""
    process.terminate()
    try:
        process.wait()
    finally:
        process.kill()  # does nothing if it has ended; processes that it started end with it
