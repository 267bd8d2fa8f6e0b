"""Terminal output: notes, colors and human-readable ages."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone
from typing import TextIO

DIM, RED, GREEN = "2", "31", "32"  # ANSI


def note(text: str) -> None:
    """Print a line about the job, not of its log, to stderr."""
    print(paint(text, DIM, has_color(sys.stderr)), file=sys.stderr, flush=True)


def seconds_since(moment: str) -> float:
    """Seconds since this RFC 3339 time."""
    return (datetime.now(timezone.utc) - datetime.fromisoformat(moment.replace("Z", "+00:00"))).total_seconds()


def age(seconds: float) -> str:
    """An age in kubectl's format: 45s, 12m, 5h, 8d; 0s if the clock that it began by is ahead of this one."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f}{unit}"
    return f"{max(seconds, 0.0):.0f}s"


def paint(text: str, code: str, color: bool) -> str:
    """The text with the ANSI color ``code`` if ``color`` is true, otherwise unchanged."""
    return f"\x1b[{code}m{text}\x1b[0m" if color else text


def has_color(stream: TextIO) -> bool:
    """Whether the stream is a terminal and NO_COLOR is not set."""
    return stream.isatty() and "NO_COLOR" not in os.environ
