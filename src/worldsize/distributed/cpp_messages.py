"""Holds back what torch's C++ code prints: for one unreachable process, forty lines of its stack."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Collect stderr and print it at the end. Yields a function that discards it, for errors that have their own message."""
    kept = True

    def discard() -> None:
        nonlocal kept
        kept = False

    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as collected:
        os.dup2(collected.fileno(), 2)
        try:
            yield discard
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            if kept:
                collected.seek(0)
                with os.fdopen(2, "wb", closefd=False) as stderr:
                    shutil.copyfileobj(collected, stderr)
