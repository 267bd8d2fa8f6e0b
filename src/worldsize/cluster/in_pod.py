"""Reporting to Kubernetes from inside a pod."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_TERMINATION_LOG = Path("/dev/termination-log")


def write_termination_message(message: str) -> None:
    """Write the container's termination message, at most 4,000 characters; Kubernetes shows it in the pod's status."""
    if message:
        with suppress(OSError):
            _TERMINATION_LOG.write_text(message[:4000])
