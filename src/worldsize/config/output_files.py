"""Files that a command writes after minutes or hours of work: their paths are checked before it."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from worldsize.errors import UserError, no_path, of_system, unwritable


def check(flag: str, path: Path) -> None:
    """Refuse a path at which no file can be written. Leaves nothing there, and does not change a file that exists.

    Args:
        flag: the option that names the path.
        path: of the file to write; one that exists is replaced.

    Raises:
        UserError: the folder of the file is missing, the path is a folder, or the file cannot be written, such as on a
            file system that can only be read.
        StoreUnreachable: the disk does not answer.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{flag} {path}: no such folder: {folder}")
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder: pass the name of a file in it")
    try:
        _try_file(path)
    except OSError as error:
        if no_path(error):  # a name that is too long, for example, which says more by itself
            raise
        raise of_system(f"{flag} {path}: cannot write there: {error.strerror}", error) from None


def check_folder(flag: str, folder: Path) -> None:
    """The same for a folder of files, which is made if it does not exist.

    Raises:
        UserError: it is a file, it cannot be made, or no file can be written there.
        StoreUnreachable: the disk does not answer.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{flag} {folder} is a file, not a folder")
    there = next(up for up in (folder.absolute(), *folder.absolute().parents) if up.exists())
    try:
        _try_folder(there)
    except OSError as error:
        raise of_system(f"{flag} {folder}: cannot write to {there}: {error.strerror}", error) from None


def _try_file(path: Path) -> None:
    """Raise the error of opening ``path`` for writing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        _try_folder(Path(os.path.realpath(path)).parent)  # of a link to no file yet, the folder of its target
        return
    if stat.S_ISREG(status.st_mode):
        # Without truncation. Permissions alone say little: root has all of them, also on disks that can only be read.
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    elif not os.access(path, os.W_OK):  # a pipe, such as >(jq), would end if it were opened and closed
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _try_folder(folder: Path) -> None:
    """Raise the error of making a file in ``folder``.

    The file has no name where the system has such files, and elsewhere a new one, which it loses at once.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_each(files: Mapping[str, Path | None]) -> None:
    """`check` each file by its option, if it is asked for, and refuse that one replaces another.

    Raises:
        UserError: as `check`, or two options name the same file.
        StoreUnreachable: as `check`.
    """
    flags: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        check(flag, path)
        if (other := flags.setdefault(path.resolve(), flag)) != flag:
            raise UserError(f"{other} and {flag} are the same file, {path}: pass another one for {flag}")


def check_text(path: Path) -> None:
    """Refuse a path that a recipe, which is text, cannot name.

    Raises:
        UserError: the path is not UTF-8.
    """
    name = str(path.expanduser().resolve())
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{os.fsencode(name)!r}: the name is not UTF-8: rename the folder or file") from None


def write_together(files: Mapping[Path, bytes]) -> None:
    """Write files. After an error, none of them is left that was not there: the next call would refuse it.

    Raises:
        UserError, StoreUnreachable: one of them cannot be written.
    """
    new = [path for path in files if not path.exists()]
    try:
        for path, content in files.items():
            with written(path):
                path.write_bytes(content)
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        raise


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
