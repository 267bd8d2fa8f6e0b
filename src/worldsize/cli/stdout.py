"""Stdout when its reader has gone, or when its disk is full."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def flush_or_drop() -> None:
    """Print what is buffered, if somebody still takes it: else Python would end with code 120."""
    try:
        sys.stdout.flush()
    except OSError:
        drop()


def drop() -> None:
    """Send nowhere what is buffered and what comes later. A stdout without a file has no reader that may leave."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
