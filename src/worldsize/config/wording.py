"""Parts of messages: numbers with nouns, and commands that can be pasted into a shell (pure)."""

from __future__ import annotations

import shlex
from pathlib import Path


def count(number: int, noun: str = "image", plural: str = "") -> str:
    """The number and the noun: ``1 image``, ``1,200 images``."""
    return f"{number:,} {form(number, noun, plural)}"


def form(number: float, noun: str, plural: str = "") -> str:
    """The noun in its form, without the number: ``epoch`` of 1, ``epochs`` of 0.5."""
    return noun if number == 1 else plural or noun + "s"


def quoted(word: str | Path) -> str:
    """The word as a shell reads it, such as a path with blanks in a command that a message shows."""
    return shlex.quote(str(word))
