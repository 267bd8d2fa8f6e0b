"""Rows of predictions as CSV, JSON, Parquet or a table for people. The columns are those of timm's inference.py."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worldsize.errors import UserError
from worldsize.inference.predict.top import Row


@dataclass(frozen=True)
class Columns:
    """Names of columns; ``index`` and ``value`` are None if they are left out. ``count`` is the number of best classes."""

    filename: str
    label: str
    index: str | None
    value: str | None
    count: int

    def repeated(self) -> str | None:
        """A name that two columns of `lists` or `flat` would have, if there is one."""
        names = [name for name in (self.index, self.label, self.value) if name is not None]
        if self.filename.rpartition("_")[0] in names and self.filename.rpartition("_")[2].isdecimal():
            return self.filename
        return next((name for name, n in Counter([self.filename, "error", *names]).items() if n > 1), None)

    def lists(self, row: Row, classes: Sequence[str]) -> dict[str, Any]:
        """The row with one list for each of label, index and value; a broken image has ``error`` instead."""
        if row.broken is not None:
            return {self.filename: row.name, "error": row.broken}
        found: dict[str, Any] = {self.filename: row.name}
        if self.index is not None:
            found[self.index] = list(row.indices)
        found[self.label] = [classes[i] for i in row.indices]
        if self.value is not None:
            found[self.value] = [float(f"{value:.7g}") for value in row.values]
        return found

    def flat(self, row: Row, classes: Sequence[str], broken: bool) -> dict[str, Any]:
        """The row with one column for each of the best classes, such as label_0; empty for a broken image.

        Args:
            broken: add the column ``error``.
        """
        lists = self.lists(row, classes)
        names = [name for name in (self.index, self.label, self.value) if name is not None]
        cells = {f"{name}_{i}": lists[name][i] if name in lists else None for name in names for i in range(self.count)}
        return {self.filename: row.name} | cells | ({"error": row.broken} if broken else {})


def encoded(form: str, rows: Sequence[Row], columns: Columns, classes: Sequence[str]) -> bytes:
    """The rows as ``csv`` or ``json``, in UTF-8.

    Of a file name that is not UTF-8, CSV has the original bytes. In JSON, they are the escapes \\udc80 to \\udcff, which
    Python reads as the name.
    """
    if form == "json":
        lines = ",\n".join(json.dumps(columns.lists(row, classes), ensure_ascii=False) for row in rows)
        return f"[\n{lines}\n]\n".encode(errors="backslashreplace")
    out = io.StringIO()
    broken = any(row.broken is not None for row in rows)
    names = columns.flat(Row("", broken="a header has no values"), classes, broken)
    writer = csv.DictWriter(out, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(columns.flat(row, classes, broken) for row in rows)
    return out.getvalue().encode(errors="surrogateescape")


def write_parquet(path: Path, rows: Sequence[Row], columns: Columns, classes: Sequence[str]) -> None:
    """Write the rows as Parquet, with the columns of the CSV form, and names in the form of `encodable`.

    Raises:
        UserError: pyarrow is missing.
    """
    arrow, parquet = arrow_modules()
    broken = any(row.broken is not None for row in rows)
    rows, classes = [replace(row, name=encodable(row.name)) for row in rows], [encodable(name) for name in classes]
    parquet.write_table(arrow.Table.from_pylist([columns.flat(row, classes, broken) for row in rows]), path)


def encodable(name: str) -> str:
    """The name with escapes such as \\udcff for bytes that are not UTF-8."""
    return name.encode(errors="backslashreplace").decode()


def arrow_modules() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet.

    Raises:
        UserError: they are missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UserError("--format parquet needs pyarrow: pip install 'worldsize[parquet]'") from None
    return pyarrow, pyarrow.parquet


def show(rows: Sequence[Row], columns: Columns, classes: Sequence[str], percent: bool, file: Path | None) -> None:
    """Print the rows as a table to ``file`` or the terminal: the best class, and the others after it."""
    from rich.text import Text

    from worldsize.config import output_files, tables, wording

    table = tables.table(columns.filename, columns.label, columns.value or "", "next")
    table.columns[2].justify = "right"
    for row in rows:
        name = Text(wording.printable(row.name))
        if row.broken is not None:
            table.add_row(name, Text("broken", style="red"), "", Text(row.broken))
            continue
        values = [f"{value:.1%}" if percent else f"{value:.3f}" for value in row.values]
        others = zip(row.indices[1:], values[1:], strict=True)
        after = ", ".join(classes[i] + (f" {value}" if columns.value else "") for i, value in others)
        table.add_row(name, Text(classes[row.indices[0]]), values[0] if columns.value else "", Text(after))
    if file is None:
        tables.console().print(table)
        return
    with output_files.written(file), open(file, "w", encoding="utf-8", errors="surrogateescape") as out:
        tables.console(out).print(table)
