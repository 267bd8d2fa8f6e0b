"""The labels in the cells of a column: one or several, and how they are separated."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable

from worldsize.data.layouts import words
from worldsize.data.layouts.tables import Cell

# The labels of an image; None: it is not labeled, which differs from having none.
ImageLabels = tuple[str, ...] | None

_BOXED = re.compile(r"(?:(\S+?)((?: -?\d+(?:\.\d+)?){4})(?: |$))+")
_ONE_BOXED = re.compile(r"(\S+?)(?: -?\d+(?:\.\d+)?){4}(?: |$)")
_SEPARATORS = ("|", ";", ",", " ", "/", "+", "&")
_STRONG = ("|", ";")


def labels(cells: Iterable[Cell], like: Iterable[str] = ()) -> tuple[list[ImageLabels], bool]:
    """The labels in each cell, and whether a cell may have several, or none. An empty cell is not labeled; [] has none.

    ``like``: cells of the same column in other tables, which may show how labels are separated.
    """
    column = [_listed(cell) for cell in cells]
    lists = [cell for cell in column if isinstance(cell, tuple)]
    if lists:
        several = any(len(one) != 1 for one in lists)
        return [_unique(cell if isinstance(cell, tuple) else (cell,)) if cell != "" else None for cell in column], several
    texts = [str(cell) for cell in column]
    filled = [text for text in texts if text]
    if filled and all(_BOXED.fullmatch(text) for text in filled):  # WORD and four numbers, for each box in the image
        parts = [_unique(_ONE_BOXED.findall(text)) if text else None for text in texts]
        return list(parts), any(one is not None and len(one) > 1 for one in parts)
    separator = _separator(Counter([*filled, *like]))
    if separator is None:
        return [(text,) if text else None for text in texts], False
    return [_unique(piece.strip() for piece in text.split(separator)) if text else None for text in texts], True


def _listed(cell: Cell) -> Cell:
    """A cell with a JSON list as text is a list."""
    if isinstance(cell, str) and cell.startswith("[") and cell.endswith("]"):
        try:
            value = json.loads(cell.replace("'", '"'))
        except ValueError:
            return cell
        return tuple(map(str, value)) if isinstance(value, list) else cell
    return cell


def _unique(parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, parts)))


def without_none(parts: list[ImageLabels]) -> tuple[list[ImageLabels], str | None]:
    """The same labels without the one that means that there is none, such as No Finding, and that one."""
    names = {label for one in parts for label in one or () if label.lower() in words.NO_LABEL}
    if len(names) != 1:
        return parts, None
    [name] = names
    if any(one is not None and name in one and len(one) > 1 for one in parts):
        return parts, None
    return [() if one == (name,) else one for one in parts], name


def _separator(texts: Counter[str]) -> str | None:
    """What separates several labels in one cell; None if each cell is one label.

    `Größe S` and `Größe M` are two labels, `scab rust` may be two in one cell. The parts of a cell are labels if they are
    fewer than the cells that they form, and most of them also occur alone.
    """
    for separator in _SEPARATORS:
        parts = {text: [part.strip() for part in text.split(separator)] for text in texts}
        combined = [one for one in parts.values() if len(one) > 1]
        if not combined or any("" in one or len(set(one)) < len(one) for one in combined):
            continue
        atoms = Counter(part for one in parts.values() for part in one)
        alone = sum(atom in texts for atom in atoms)
        if separator in _STRONG and (alone or max(atoms.values()) > 1):
            return separator
        if len(atoms) < len(texts) and alone * 2 >= len(atoms):
            return separator
    return None
