"""Parses Kubernetes quantities; not with the Kubernetes client's parser, because Slurm jobs use them too."""

from __future__ import annotations

import re
from fractions import Fraction

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?", re.ASCII)
_SMALL = {"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(1000)}
_UNITS = _SMALL | {
    letter + i: Fraction(base) ** power
    for i, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("KMGTPE", start=1)
}


def quantity(text: str | int) -> Fraction:
    """The exact value of a quantity: "250m" is 1/4, "1Ki" is 1024, "2e3" is 2000.

    Raises:
        ValueError: not a quantity.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    suffix = match[2] or ""
    return Fraction(match[1]) * _UNITS[suffix] if suffix in _UNITS else Fraction(match[1] + suffix)
