"""What fsspec's many programs have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def faults_as_oserror() -> Iterator[None]:
    """They fail with exceptions of their own (botocore's, aiohttp's, ...); raise OSError instead, with their words."""
    try:
        yield
    except (OSError, TypeError, AttributeError, NotImplementedError):  # the latter are defects
        raise
    except Exception as error:
        name = type(error).__name__
        kind = PermissionError if "credential" in f"{name} {error}".lower() else OSError
        raise kind(f"{name}: {error}") from error
