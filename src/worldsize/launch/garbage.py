"""Python's search for garbage, kept away from what a process imports and compiles.

Importing torch makes half a million objects that stay until the end. Python would search all of them several times while a
process starts, and again during training, where each full search delays one rank by tenths of a second, and so all of them.
"""

from __future__ import annotations

import atexit
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
            _freeze()
        if enabled:
            gc.enable()


def spare_existing() -> None:
    """Free what is garbage now, and never search the rest again."""
    gc.unfreeze()
    gc.collect()
    _freeze()


def _freeze() -> None:
    gc.freeze()
    atexit.unregister(_unfreeze_triton)
    atexit.register(_unfreeze_triton)


def _unfreeze_triton() -> None:
    """Let Python free Triton's objects when it exits.

    nanobind, with which Triton 3.9 binds its library, prints those that are left, as leaks. Without Triton, Python exits
    faster if it does not look at them.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
