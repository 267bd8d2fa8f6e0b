"""Parts of messages: numbers with nouns, and commands that can be pasted into a shell (pure)."""

from __future__ import annotations

import shlex
import unicodedata
from pathlib import Path


def count(number: int, noun: str = "image", plural: str = "") -> str:
    """The number and the noun: ``1 image``, ``1,200 images``."""
    return f"{number:,} {form(number, noun, plural)}"


def form(number: float, noun: str, plural: str = "") -> str:
    """The noun in its form, without the number: ``epoch`` of 1, ``epochs`` of 0.5."""
    return noun if number == 1 else plural or noun + "s"


def printable(name: str) -> str:
    """The name, such as that of a file, in a form that every terminal shows.

    Python's escapes, such as ``\\x1b``, stand for line breaks, bytes that are not UTF-8, and characters that a terminal
    obeys or that turn the direction of a text. Blanks of other scripts stay, and joiners, as in words and emoji.
    """
    if name.isprintable():
        return name
    return "".join(one if one.isprintable() or _blank_or_joiner(one) else repr(one)[1:-1] for one in name)


def printable_lines(text: str) -> str:
    """The same for a text of lines, such as a message with names: its line breaks and tabs stay."""
    if text.isprintable():
        return text
    return "".join(one if one in "\n\t" else printable(one) for one in text)


def _blank_or_joiner(one: str) -> bool:
    return unicodedata.category(one) == "Zs" or one in "\u200c\u200d"


def quoted(word: str | Path) -> str:
    """The word for a command in a message: a shell keeps its blanks, and a path that begins with a dash is no flag."""
    return shlex.quote(f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word))
