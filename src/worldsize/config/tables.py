"""The console that commands print tables on, and the form of those tables."""

from __future__ import annotations

import os
import sys
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Wider than any line: what is no terminal, such as grep or a file, gets whole names and one line for each row.
_WHOLE = 100_000


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit with 1, which means something else. `cli.main` ends as any filter does.
        raise


def console(file: IO[str] | None = None, stderr: bool = False, highlight: bool = True, soft_wrap: bool = False) -> Console:
    """A console on ``file``, by default on stdout or stderr; raises BrokenPipeError when its reader has gone."""
    terminal = (file or (sys.stderr if stderr else sys.stdout)).isatty()
    width = None if terminal or "COLUMNS" in os.environ else _WHOLE
    return _Console(file=file, stderr=stderr, highlight=highlight, soft_wrap=soft_wrap, width=width)


def table(*titles: str) -> Table:
    """A table without lines. A narrow terminal folds what does not fit, because a name that is cut is no name."""
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        made.add_column(Text(title), overflow="fold")
    return made
