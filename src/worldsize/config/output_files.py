"""Files that a command writes after minutes or hours of work: their paths are checked before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldsize.errors import UserError, of_system


def check(flag: str, path: Path) -> None:
    """Refuse a path at which no file can be.

    Args:
        flag: the option that names the path.
        path: of the file to write; one that exists is replaced.

    Raises:
        UserError: the folder of the file is missing, or the path is a folder.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{flag} {path}: no such folder: {folder}")
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder: pass the name of a file in it")


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Around writing the file ``path``: explains what the disk refuses.

    Raises:
        UserError, StoreUnreachable: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise of_system(f"cannot write {error.filename or path}: {error.strerror or error}", error) from None
