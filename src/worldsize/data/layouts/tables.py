"""Tables in files: CSV and other separated text, lists, JSON, JSON lines, and the XML of CVAT."""

from __future__ import annotations

import csv
import io
import json
import posixpath
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from worldsize.data.datasets.file_index import has_image_extension
from worldsize.data.layouts import words

# Several values in one cell, such as a JSON list, are a tuple.
Cell = str | tuple[str, ...]
# How surely a text is the name of an image, given the table's path: 0 to 2.
Known = Callable[[str, str], int]

_TEXT = (".csv", ".tsv", ".tab", ".txt", ".lst", ".list", ".psv")
_JSON = (".json", ".jsonl", ".ndjson")
EXTENSIONS = (*_TEXT, *_JSON, ".xml")
_LARGEST = 2_000_000_000  # bytes
_TRIED = 300  # rows, to decide how a file is separated and which column names images
_BLANKS: dict[str, Callable[[str], list[str]]] = {
    "blanks": str.split,
    "first blank": lambda line: line.split(None, 1),
    "last blank": lambda line: line.rsplit(None, 1),
    "none": lambda line: [line],
}
_SEPARATORS = (",", ";", "\t", "|", *_BLANKS)


@dataclass(frozen=True)
class Table:
    """A table: its file, relative to the folder of the dataset, its column names, and its rows.

    ``headed`` is False if the columns have no names of their own. ``file`` is the column that names images; None: none does.
    """

    source: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    headed: bool
    file: int | None

    def column(self, index: int) -> Iterator[Cell]:
        """The cells of a column; empty where a row is too short."""
        return (row[index] if index < len(row) else "" for row in self.rows)


def read(root: Path, source: str, known: Known) -> Table | None:
    """Read the file ``source`` in ``root``; None if it is no table."""
    path = root / source
    extension = posixpath.splitext(source)[1].lower()
    if extension not in EXTENSIONS or not 0 < path.stat().st_size < _LARGEST:
        return None
    text = decoded(path.read_bytes())
    if text is None:
        return None
    if extension in _TEXT:
        return _separated(text, source, known)
    records = list(_xml(text) if extension == ".xml" else _records(text))
    return from_records(records, source, known) if records else None


def decoded(data: bytes) -> str | None:
    """The text of a file in UTF-8, UTF-16 or, as old spreadsheets save it, Windows' Latin; None if it is none of these."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", "replace")
    if b"\0" in data[:10_000]:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


# Separated text -----------------------------------------------------------------------------------------------------------


def _separated(text: str, source: str, known: Known) -> Table | None:
    best: tuple[int, str, int] = (0, "", 0)
    for separator in _SEPARATORS:
        sample = list(islice(_rows(text, separator), _TRIED))
        column, found = _file_column(sample, source, known)
        if found > best[0]:
            best = found, separator, column
    found, separator, column = best
    if separator == "blanks" and column == 0 and not _is_even(list(islice(_rows(text, separator), _TRIED))):
        separator = "first blank"  # labels with blanks in them
    rows = list(_rows(text, separator if found else _guess(text)))
    if len(rows) > 1 and len(rows[0]) == 1 < len(rows[1]) and str(rows[0][0]).isdecimal():
        rows = rows[1:]  # the number of rows
    if not rows:
        return None
    if not found:
        return Table(source, _numbered(rows[0]), rows, headed=False, file=None)
    first = str(rows[0][column]) if column < len(rows[0]) else ""
    headed = not known(first, source) and not has_image_extension(first) and "/" not in first and len(rows) > 1
    if headed:
        names = tuple(str(cell).strip() or f"column {i + 1}" for i, cell in enumerate(rows[0]))
        if column == 0 and len(names) + 1 == len(rows[1]) and separator in _BLANKS:
            names = ("file", *names)
        return Table(source, names, rows[1:], headed=True, file=column)
    return Table(source, _numbered(max(islice(rows, _TRIED), key=len)), rows, headed=False, file=column)


def _is_even(rows: list[tuple[Cell, ...]]) -> bool:
    """Whether all rows have as many cells, after a line with their number and a line with the names of the columns."""
    rows = rows[1:] if len(rows[0]) == 1 else rows
    widths = {len(row) for row in rows[1:]}
    return not rows or not widths or (len(widths) == 1 and max(widths) - len(rows[0]) in (0, 1))


def _guess(text: str) -> str:
    """The separator of a table that names no images."""
    first = text.split("\n", 1)[0]
    return next((separator for separator in ("\t", ",", ";") if separator in first), "first blank")


def _numbered(row: tuple[Cell, ...]) -> tuple[str, ...]:
    return tuple(f"column {i + 1}" for i in range(len(row)))


def _rows(text: str, separator: str) -> Iterator[tuple[Cell, ...]]:
    """The rows that are not empty; cells without the blanks around them."""
    if separator in _BLANKS:
        for line in text.splitlines():
            if (line := line.strip()) and not line.startswith("#"):
                yield tuple(_BLANKS[separator](line))
        return
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator):
            cells = tuple(cell.strip() for cell in row)
            if any(cells) and not cells[0].startswith("#"):
                yield cells
    except csv.Error:
        return


def _file_column(rows: list[tuple[Cell, ...]], source: str, known: Known) -> tuple[int, int]:
    """The column whose cells name the most images, and how many different ones it names, weighted by certainty."""
    best = 0, 0
    for column in range(max(map(len, rows), default=0)):
        cells = {row[column] for row in rows if column < len(row)}
        if not any(isinstance(cell, tuple) for cell in cells):
            found = sum(known(str(cell), source) for cell in cells)
            if found > best[1]:
                best = column, found
    return best


# JSON and XML -------------------------------------------------------------------------------------------------------------


def _records(text: str) -> Iterator[dict[str, Any]]:
    """The records of a JSON document or of JSON lines."""
    try:
        data = json.loads(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            data = [json.loads(line) for line in lines]
        except ValueError:
            return
    if isinstance(data, dict) and isinstance(data.get("images"), list) and isinstance(data.get("annotations"), list):
        yield from _coco(data)
    elif isinstance(data, dict):
        lists = [value for value in data.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        yield from lists[0] if len(lists) == 1 else _pairs(data)
    elif isinstance(data, list):
        yield from (_label_studio(record) for record in data if isinstance(record, dict))


def _pairs(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``{FILE: LABEL}``, ``{FILE: RECORD}`` or ``{LABEL: [FILE, ...]}``."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield {"file": key, **value}
        elif isinstance(value, list) and value and (has_image_extension(str(value[0])) or "/" in str(value[0])):
            yield from ({"file": file, "label": key} for file in value)
        elif isinstance(value, (str, int, list)):
            yield {"file": key, "label": value}


def _coco(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """COCO's tables, joined: a record per annotation, and one for each image without any."""
    names = {one.get("id"): str(one.get("name")) for one in data.get("categories", [])}
    files = {one.get("id"): one.get("file_name", "") for one in data["images"]}
    for one in data["annotations"]:
        boxed = {"bbox": "box"} if one.get("bbox") or one.get("segmentation") else {}
        yield {"file_name": files.get(one.get("image_id"), ""), "label": names.get(one.get("category_id"), ""), **boxed}
    for image in files.keys() - {one.get("image_id") for one in data["annotations"]}:
        yield {"file_name": files[image], "label": ""}


def _label_studio(record: dict[str, Any]) -> dict[str, Any]:
    """Label Studio's complete export, as its short form: the fields of the task, and the choices."""
    if not isinstance(record.get("data"), dict) or "annotations" not in record:
        return record
    values = [
        value
        for annotation in record["annotations"][:1]
        for result in annotation.get("result", [])
        if isinstance(value := result.get("value"), dict)
    ]
    choices = list(chain.from_iterable(value.get("choices", []) for value in values))
    boxed = {"bbox": "box"} if any("x" in value or "points" in value for value in values) else {}
    return {**record["data"], "choice": choices, **boxed}


def _xml(text: str) -> Iterator[dict[str, Any]]:
    """CVAT's images with their tags; other XML has boxes, or no labels."""
    if "<!ENTITY" in text:
        return
    try:
        tree = ElementTree.fromstring(re.sub(r"^<\?xml[^>]*\?>", "", text.lstrip()))
    except ElementTree.ParseError:
        return
    for image in tree.iter("image"):
        shapes = {child.tag for child in image} & {"box", "polygon", "polyline", "points", "mask", "cuboid", "ellipse"}
        tags = [tag.get("label", "") for tag in image.iter("tag")]
        if image.get("name"):
            yield {"file": image.get("name"), "label": tags or None, **({"bbox": "box"} if shapes and not tags else {})}


def from_records(records: list[dict[str, Any]], source: str, known: Known) -> Table | None:
    """A table with a column for each field of the records."""
    columns = tuple(dict.fromkeys(chain.from_iterable(records)))
    rows = [tuple(_cell(record.get(name)) for name in columns) for record in records]
    column, found = _file_column(rows[:_TRIED], source, known)
    names = tuple(map(str, columns))
    return Table(source, names, rows, headed=True, file=column if found else None)


def _cell(value: Any) -> Cell:
    if isinstance(value, dict):  # {"choices": [...]} and the like
        return _cell(next(iter(value.values()))) if len(value) == 1 else ""
    if isinstance(value, list):
        texts = (one.get("name", one.get("label", "")) if isinstance(one, dict) else one for one in value)
        return tuple(str(text).strip() for text in texts)
    return "" if value is None else str(value).strip()


def is_template(source: str) -> bool:
    """Whether a file is an example of what to submit to a competition: its labels mean nothing."""
    return bool({"submission", "submissions", "submit", "samplesubmission"} & set(words.words(posixpath.basename(source))))
