"""Names of classes that tables only number or code: ``{"0": "Healthy"}``, ``/m/01yrx,Cat``, or a line for each class."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from worldsize.data.layouts import words
from worldsize.data.layouts.tables import Table, decoded

_LISTS = words.LABEL | {"classnames", "name", "names", "synsets", "wnids"}
_LARGEST = 20_000_000  # bytes


def names(labels: set[str], root: Path, others: Iterable[str], tables: Iterable[Table]) -> tuple[str, dict[str, str]] | None:
    """A sentence about the file that names ``labels``, and the name of each; None if there is none, or files disagree.

    There are no names if it is unclear whether the file counts from 0 or from 1; the sentence says so.

    Args:
        labels: what tables call the classes.
        root: the folder of the dataset.
        others: its files that are no images.
        tables: its tables.
    """
    if not labels or not all(re.search(r"\d", label) for label in labels):
        return None
    every = [*_from_tables(labels, tables), *_from_files(labels, root, others)]
    found = [(source, mapping) for source, mapping in every if mapping]
    if every and not found:
        return f"the classes keep their numbers: {every[0][0]} may count from 0 or from 1", {}
    different = {tuple(sorted(mapping.items())) for _, mapping in found}
    return (f"the names of the classes are in {found[0][0]}", found[0][1]) if len(different) == 1 else None


def _from_tables(labels: set[str], tables: Iterable[Table]) -> Iterable[tuple[str, dict[str, str]]]:
    """Tables of two columns: a code and a name."""
    for table in tables:
        if table.file is None and table.rows:
            pairs = [tuple(map(str, row[:2])) for row in table.rows if len(row) > 1]
            mapping = {pair[0]: pair[1] for pair in pairs}
            if len(mapping) == len(pairs) and _names(mapping, labels):
                yield table.source, {label: mapping[label] for label in labels}


def _from_files(labels: set[str], root: Path, others: Iterable[str]) -> Iterable[tuple[str, dict[str, str]]]:
    for source in others:
        extension = posixpath.splitext(source)[1].lower()
        if extension not in (".json", ".txt", ".names") or (root / source).stat().st_size > _LARGEST:
            continue
        text = decoded((root / source).read_bytes()) or ""
        mapping = _json(text) if extension == ".json" else _coded(text)
        if not _names(mapping, labels) and set(words.words(posixpath.basename(source))) & _LISTS:
            mapping = _numbered(text, labels)
            if _names(mapping, labels) and _may_begin_anywhere(len(mapping), labels):
                yield source, {}
                continue
        if _names(mapping, labels):
            yield source, {label: mapping[label] for label in labels}


def _names(mapping: dict[str, str], labels: set[str]) -> bool:
    chosen = [mapping.get(label, "") for label in labels]
    return all(re.search(r"[^\W\d_]", name) for name in chosen) and len(set(chosen)) == len(labels)


def _json(text: str) -> dict[str, str]:
    """``{CODE: NAME}`` or ``{NAME: NUMBER}`` or a list of names."""
    try:
        data = json.loads(text)
    except ValueError:
        return {}
    if isinstance(data, list):
        return {str(i): name for i, name in enumerate(data) if isinstance(name, str)}
    if not isinstance(data, dict):
        return {}
    if all(isinstance(value, int) for value in data.values()):
        return {str(number): name for name, number in data.items()}
    return {code: name for code, name in data.items() if isinstance(name, str)}


def _coded(text: str) -> dict[str, str]:
    """Lines of a code, a blank or a tab, and a name."""
    pairs = [line.strip().split(None, 1) for line in text.splitlines() if line.strip()]
    return {pair[0].rstrip(":,;"): pair[1] for pair in pairs if len(pair) == 2}


def _may_begin_anywhere(lines: int, labels: set[str]) -> bool:
    """Whether numbers of lines may count from 0 or from 1, because neither 0 nor the number of lines is among them."""
    return all(0 < int(label) < lines for label in labels)


def _numbered(text: str, labels: set[str]) -> dict[str, str]:
    """A name in each line, numbered from 0 or, if there is no 0 and the last line has a label, from 1."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not all(label.isdecimal() for label in labels):
        return {}
    first = 0 if "0" in labels or str(len(lines)) not in labels else 1
    return {str(i): line for i, line in enumerate(lines, first)} if max(map(int, labels)) < len(lines) + first else {}
