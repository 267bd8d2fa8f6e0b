"""Labels in a file of each image, next to it or in another folder: ``1.jpg`` and ``1.cls``, ``1.txt`` or ``1.json``."""

from __future__ import annotations

import json
import posixpath
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worldsize.data.layouts.inventory import stem
from worldsize.data.layouts.resolve import Finder
from worldsize.data.layouts.tables import Cell, Table, decoded, from_records

_LARGEST = 100_000  # bytes of one file
_LONGEST = 100  # characters of a label
_EXTENSIONS = (".cls", ".txt", ".json")
_FEWEST = 2


def tables(root: Path, others: Iterable[str], finder: Finder) -> list[Table]:
    """The files about single images as tables, one for each extension.

    Args:
        root: the folder of the dataset.
        others: its files that are no images.
        finder: finds the image that a file is about.
    """
    records: dict[str, list[dict[str, Any]]] = defaultdict(list)
    spoiled: set[str] = set()
    for other in others:
        extension = posixpath.splitext(other)[1].lower()
        if extension not in _EXTENSIONS or extension in spoiled:
            continue
        image = finder.find(stem(other), other)
        if image is None:
            continue
        record = _record(root / other, extension)
        if record is None:
            spoiled.add(extension)  # captions or boxes
        else:
            records[extension].append({"file": image, **record})
    found = []
    for extension, rows in records.items():
        if extension not in spoiled and len(rows) >= _FEWEST:
            table = from_records(rows, f"*{extension}", finder.certainty)
            found += [table] if table is not None and _repeats(table) else []
    return found


def _record(path: Path, extension: str) -> dict[str, Any] | None:
    """What the file says; None if it is no label."""
    if path.stat().st_size > _LARGEST or (text := decoded(path.read_bytes())) is None:
        return None
    if extension == ".json":
        try:
            value = json.loads(text)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {"label": lines[0]} if len(lines) == 1 and len(lines[0]) <= _LONGEST else None


def _repeats(table: Table) -> bool:
    """Whether a column has values that several images share; captions have not."""
    columns: list[list[Cell]] = [list(table.column(i)) for i in range(len(table.columns)) if i != table.file]
    return any(len(set(column)) * 2 <= len(column) for column in columns)
