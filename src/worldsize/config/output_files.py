"""Files that a command writes after minutes or hours of work: their paths are checked before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from worldsize.errors import UserError, of_system, unwritable


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


def check_each(files: Mapping[str, Path | None]) -> None:
    """`check` each file by its option, if it is asked for, and refuse that one replaces another.

    Raises:
        UserError: as `check`, or two options name the same file.
    """
    flags: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        check(flag, path)
        if (other := flags.setdefault(path.resolve(), flag)) != flag:
            raise UserError(f"{other} and {flag} are the same file, {path}: pass another one for {flag}")


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Around writing the file ``path``: explains what the disk refuses. Of a full disk, no part of the file stays.

    Raises:
        UserError, StoreUnreachable: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        if unwritable(error) is not None and path.is_file():
            with suppress(OSError):
                path.unlink()
        raise of_system(f"cannot write {error.filename or path}: {error.strerror or error}", error) from None
