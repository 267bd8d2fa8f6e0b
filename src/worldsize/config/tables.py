"""The console that commands print tables on."""

from __future__ import annotations

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit with 1, which means something else. `cli.main` ends as any filter does.
        raise


def console(stderr: bool = False, highlight: bool = True, soft_wrap: bool = False) -> Console:
    """A console on stdout or stderr; raises BrokenPipeError when its reader has gone."""
    return _Console(stderr=stderr, highlight=highlight, soft_wrap=soft_wrap)
