"""Common handling of fsspec file systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")  # exception names of botocore


@contextmanager
def faults_as_oserror() -> Iterator[None]:
    """Convert exceptions of fsspec's backends (botocore, aiohttp, ...) to OSError, with their message.

    Python's built-in exceptions pass through: they mean a missing package, a wrong setting, or a defect.
    """
    try:
        yield
    except (OSError, ImportError, ValueError, TypeError, AttributeError, NotImplementedError):
        raise
    except Exception as error:
        name = type(error).__name__
        kind = PermissionError if name in _NO_CREDENTIALS else OSError
        raise kind(f"{name}: {error}") from error
