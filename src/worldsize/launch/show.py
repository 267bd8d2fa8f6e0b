"""Showing a followed job in a terminal or a file."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime, timezone
from typing import TextIO

from worldsize.launch.follow import Follower, Line, Note
from worldsize.launch.target import State

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI, by rank
_DIM, _RED, _GREEN = "2", "31", "32"


class TimedOut(Exception):
    """Following took longer than was allowed; the job goes on."""


def follow(follower: Follower, timeout_s: float | None = None, rank: int | None = None) -> State:
    """Print log lines to stdout and what happens to the job to stderr, until it has ended.

    Args:
        rank: print this rank's lines alone.

    Raises:
        TimedOut: the job has not ended after ``timeout_s``.
    """
    begun = time.monotonic()
    for event in follower.events():
        if isinstance(event, Note):
            note(event.text)
        elif event is not None and (rank is None or event.rank == rank):
            print(_prefixed(event, _coloured(sys.stdout)), flush=True)
        if timeout_s is not None and time.monotonic() - begun > timeout_s:
            raise TimedOut
    return follower.state


def note(text: str) -> None:
    """A line about the job itself."""
    print(_paint(text, _DIM, _coloured(sys.stderr)), file=sys.stderr, flush=True)


def ending(state: State, failures: list[str]) -> None:
    """How the job ended, and why where it failed."""
    colour = _coloured(sys.stderr)
    if state.phase == "Succeeded":
        print(_paint("succeeded", _GREEN, colour), file=sys.stderr)
        return
    print(_paint(f"failed{': ' + state.reason if state.reason else ''}", _RED, colour), file=sys.stderr)
    for text in failures[:3]:
        print("\n".join(f"  {line}" for line in text.splitlines()), file=sys.stderr)


def seconds_since(moment: str) -> float:
    """Since this RFC 3339 time."""
    return (datetime.now(timezone.utc) - datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()


def age(seconds: float) -> str:
    """As kubectl says it: 45s, 12m, 5h, 8d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds:.0f}s"


def _prefixed(line: Line, colour: bool) -> str:
    if line.rank is None:
        return _paint(f"{line.pod} | {line.text}", _DIM, colour)
    return _paint(f"{line.rank:>3} | ", str(_COLOURS[line.rank % len(_COLOURS)]), colour) + line.text


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ
