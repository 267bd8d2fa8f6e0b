"""The console that commands print tables on, and the form of those tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from worldsize.config.wording import printable_lines

# Wider than any line: what is no terminal, such as grep or a file, gets whole names and one line for each row.
_WHOLE = 100_000


class PrintableConsole(Console):
    """A console that shows what is not printable, such as in names of files, as escapes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable_lines(text), style, control)


class _Console(PrintableConsole):
    def on_broken_pipe(self) -> None:
        # rich would exit with 1, which means something else. `cli.main` ends as any filter does.
        raise


def console(file: IO[str] | None = None, stderr: bool = False, highlight: bool = True, soft_wrap: bool = False) -> Console:
    """A console on ``file``, by default on stdout or stderr; raises BrokenPipeError when its reader has gone."""
    terminal = (file or (sys.stderr if stderr else sys.stdout)).isatty()
    width = None if terminal or "COLUMNS" in os.environ else _WHOLE
    return _Console(file=file, stderr=stderr, highlight=highlight, soft_wrap=soft_wrap, width=width)


class _Table(Table):
    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row. What is not printable in it is escaped here, because columns are as wide as their texts."""
        super().add_row(*map(_printable, cells), **options)


def _printable(cell: RenderableType | None) -> RenderableType | None:
    if isinstance(cell, Text):
        shown = printable_lines(cell.plain)
        return cell if shown == cell.plain else Text(shown, cell.style)
    return printable_lines(cell) if isinstance(cell, str) else cell


def table(*titles: str) -> Table:
    """A table without lines. A narrow terminal folds what does not fit, because a name that is cut is no name."""
    made = _Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        made.add_column(Text(title), overflow="fold")
    return made
