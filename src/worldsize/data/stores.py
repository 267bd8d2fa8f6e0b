"""What fsspec's many programs have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")  # botocore's


@contextmanager
def faults_as_oserror() -> Iterator[None]:
    """They fail with exceptions of their own (botocore's, aiohttp's, ...); raise OSError instead, with their words.

    What Python's own exceptions say is left alone: a program that is not installed, a wrong setting, a defect.
    """
    try:
        yield
    except (OSError, ImportError, ValueError, TypeError, AttributeError, NotImplementedError):
        raise
    except Exception as error:
        name = type(error).__name__
        kind = PermissionError if name in _NO_CREDENTIALS else OSError
        raise kind(f"{name}: {error}") from error
