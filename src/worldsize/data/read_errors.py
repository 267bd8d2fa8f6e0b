"""Reads that fail because of the place they read from (a disk, a network, a limit of this process), not because of the file.

Such an error says nothing about the image, so it must not change which images a run sees: the read is repeated.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from worldsize.errors import Forbidden, ReadFailed
from worldsize.watchdog import heartbeat

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_DELAYS_S = (1, 2, 4, 8, 8)  # before each retry; stopping a run may have to wait for them

_MISSING = (errno.ENOENT, errno.ENOTDIR)
_OF_THE_FILE = (*_MISSING, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR)


def of_the_file(error: OSError, path: Path) -> bool:
    """Whether a read failed because of the file ``path`` itself: it is missing, though its folder is there, or no file."""
    # Not path.parent: the links of a dataset may lead to another volume.
    return error.errno in _OF_THE_FILE and not (error.errno in _MISSING and _vanished(Path(os.path.realpath(path)).parent))


def _vanished(folder: Path) -> bool:
    """Whether the folder is gone, or empty as the mount point of a volume that is gone."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError:
        return True


class Patience:
    """Repeats reads. After one has failed for good, the others fail at once: their place is the same."""

    def __init__(self) -> None:
        self._spent = False

    def read(self, path: Path, attempt: Callable[[], T]) -> T:
        """The result of ``attempt``, which reads ``path``; repeated for 23 seconds while the place is at fault.

        Raises:
            OSError: of the file itself, see `of_the_file`.
            ReadFailed: the place stayed at fault.
            Forbidden: there is no permission to read the file.
        """
        for delay in RETRY_DELAYS_S:
            try:
                with heartbeat.reading(str(path)):
                    return attempt()
            except OSError as error:
                if of_the_file(error, path):
                    raise
                if isinstance(error, PermissionError):
                    raise Forbidden(f"{path} cannot be read: {error.strerror}; check its permissions") from error
                if self._spent:
                    raise _lasting(path, error) from error
                log.warning("%s cannot be read (%s); retrying in %g s", path, error.strerror or error, delay)
            time.sleep(delay)
        try:
            return attempt()
        except OSError as error:
            if of_the_file(error, path):
                raise
            self._spent = True
            raise _lasting(path, error) from error


def _lasting(path: Path, error: OSError) -> ReadFailed:
    what = f"{path} cannot be read: {error.strerror or error}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ReadFailed(f"{what}; raise the limit of open files (ulimit -n), or lower --data.readers")
    if error.errno in _MISSING:
        return ReadFailed(f"{what}, and neither can its folder: its volume is gone; mount it again, then resume")
    return ReadFailed(f"{what}. This is an error of the disk or the network, not of the image; once it recovers, resume")
