"""Prints a followed job to a terminal or a file."""

from __future__ import annotations

import sys
import time

from worldsize.jobs.state import Follower, JobState, Line, Note
from worldsize.jobs.terminal import DIM, GREEN, RED, has_color, note, paint

_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI, by rank


class TimedOut(Exception):
    """The timeout for following expired; the job keeps running."""


def follow(follower: Follower, timeout_s: float | None = None, rank: int | None = None) -> JobState:
    """Print log lines to stdout and changes of the job's state to stderr, until the job has ended.

    Args:
        rank: print only this rank's lines.

    Raises:
        TimedOut: the job has not ended after ``timeout_s``.
    """
    started = time.monotonic()
    for event in follower.events():
        if isinstance(event, Note):
            note(event.text)
        elif event is not None and (rank is None or event.rank == rank):
            show(event)
        if timeout_s is not None and time.monotonic() - started > timeout_s:
            raise TimedOut
    return follower.state


def show(line: Line) -> None:
    """Print a log line to stdout."""
    print(_prefixed(line, has_color(sys.stdout)), flush=True)


def ending(state: JobState, failures: list[str]) -> None:
    """Print how the job ended, and the first failures if it failed."""
    color = has_color(sys.stderr)
    if state.phase == "Suspended":
        reason = state.reason or "training with the same name resumes its run"
        print(paint(f"stopped: {reason}", DIM, color), file=sys.stderr)
        return
    if state.phase == "Succeeded":
        print(paint("succeeded", GREEN, color), file=sys.stderr)
        return
    print(paint(f"failed{': ' + state.reason if state.reason else ''}", RED, color), file=sys.stderr)
    for text in failures[:3]:
        print("\n".join(f"  {line}" for line in text.splitlines()), file=sys.stderr)


def _prefixed(line: Line, color: bool) -> str:
    if line.rank is None:
        return paint(f"{line.source} | {line.text}", DIM, color)
    return paint(f"{line.rank:>3} | ", str(_COLORS[line.rank % len(_COLORS)]), color) + line.text
