"""Tables of results."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as text. The first row has the headings, the first column the names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    rule = " | ".join(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))
