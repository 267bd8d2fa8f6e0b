"""The checksum that the user or the dataset expects of an archive."""

from __future__ import annotations

import re

from worldsize.data.fetch.state import FetchState
from worldsize.errors import DataError, UserError


def expected(sha256: str | None, published: str | None) -> str | None:
    """The checksum to verify, as ALGORITHM:DIGEST: that of --sha256, or the one that is published for the source.

    Raises:
        UserError: --sha256 is malformed, which a download of hours should not have to find out.
    """
    if sha256 is None:
        return published
    if not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UserError(f"--sha256 {sha256}: a SHA-256 has 64 hexadecimal digits")
    return f"sha256:{sha256.lower()}"


def compare(sha256: str, state: FetchState) -> None:
    """Compare a checksum with the one that the complete fetch verified.

    Raises:
        DataError: it verified another SHA-256.
    """
    if state.checked == f"sha256:{sha256.lower()}":
        return
    if state.checked.startswith("sha256:"):
        raise DataError(f"{state.root} was fetched from an archive with another checksum, {state.checked}")
    print(
        f"warning: --sha256 was not checked, because {state.root} was complete before; to check it, fetch into a new folder"
    )
