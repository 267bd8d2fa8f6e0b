"""Python's search for garbage, kept away from what a process imports and compiles.

Importing torch makes half a million objects that stay until the end. Python would search all of them several times while a
process starts, and again during training, where each full search delays one rank by tenths of a second, and so all of them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_sought() -> Iterator[None]:
    """Search for no garbage in this block; if it imports modules, never search what exists at its end.

    For the start of a process: what is garbage at the end of the block is never freed.
    """
    modules, enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if enabled:
            gc.enable()


def spare_existing() -> None:
    """Free what is garbage now, and never search the rest again."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
