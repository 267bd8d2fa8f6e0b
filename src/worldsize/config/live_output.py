"""Whether output may be live: a bar or a line that is drawn again and again needs a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def possible(console: Console) -> bool:
    """Whether what the console writes to is a terminal that can be drawn over.

    rich alone takes a pipe or a file for one if FORCE_COLOR is set, as it is in Jupyter and in many CI systems; there, each
    drawing would become a line.
    """
    return console.file.isatty() and console.is_terminal
