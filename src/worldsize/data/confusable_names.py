"""Names that people cannot tell apart: in another Unicode form, or with blanks around them (pure)."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def look_alikes(names: Iterable[str], others: Iterable[str]) -> str:
    """A sentence about the first name that looks like one of ``others`` but is not equal to it; empty: there is none.

    It begins with ``. `` and shows both names with escapes, because macOS writes é as two characters and Linux as one.
    """
    equal = set(others)
    known = {_appearance(other): other for other in sorted(equal)}
    for name in names:
        other = known.get(_appearance(name), name)
        if name not in equal and other != name:
            # ascii() shows the characters.
            difference = _difference(name, other)
            return f". {name!a} and {other!a} look alike, but {difference}: rename one of them to the other"
    return ""


def _appearance(name: str) -> str:
    return "/".join(part.strip() for part in unicodedata.normalize("NFC", name).split("/"))


def _difference(name: str, other: str) -> str:
    same_form = unicodedata.normalize("NFC", name) == name and unicodedata.normalize("NFC", other) == other
    return "one has blanks at an end" if same_form else "their Unicode forms differ"
