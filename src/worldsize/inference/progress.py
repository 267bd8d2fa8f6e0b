"""How many images are done, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worldsize.config import live_output

_LOG_EVERY_S = 15.0


@contextmanager
def images(share: int, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """On stderr: a bar on a terminal, otherwise a line every 15 s. The caller reports each batch of its share."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    live = live_output.possible(console)
    columns = (TextColumn("images"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not (shown and live)) as bar:
        task = bar.add_task("", total=total)
        begin = logged = time.monotonic()
        done = 0

        def advance(new: int) -> None:
            nonlocal done, logged
            done += new
            every = round(done * total / max(share, 1))  # the other processes are about as fast
            bar.update(task, completed=every)
            now = time.monotonic()
            if shown and not live and now - logged >= _LOG_EVERY_S:
                logged = now
                print(f"{every:,} of {total:,} images, {every / (now - begin):,.0f} images/s", file=sys.stderr, flush=True)

        yield advance
