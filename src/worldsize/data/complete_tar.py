"""Tar files that must be complete: tarfile takes a damaged or missing header for the end of the archive."""

from __future__ import annotations

import tarfile
from tarfile import TarFile, TarInfo
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class CompleteEntry(TarInfo):
    """The ``tarinfo`` with which `tarfile.open` refuses an archive whose end is missing."""

    @classmethod
    def fromtarfile(cls, archive: TarFile) -> Self:
        """Read the next entry.

        Raises:
            ReadError: its header is damaged or missing.
        """
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the regular end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"truncated or damaged: {error}") from None
