"""Common handling of fsspec file systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# A file of references is a program for fsspec: its templates are Jinja2's, which older versions run without a sandbox.
_PROGRAMS = ("reference",)
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


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    Recipes name such URLs, and the recipes of others must not run programs.

    Raises:
        OSError: it does not answer.
        ImportError: it needs another package.
        ValueError: no such protocol, or one that can run programs.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    for part in url.split("::"):
        if (protocol := part.partition("://")[0]) in _PROGRAMS:
            raise ValueError(f"{protocol}:// is not supported, because its files can run programs")
    with faults_as_oserror():
        found: tuple[Any, str] = url_to_fs(url)
    return found
