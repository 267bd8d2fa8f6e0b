"""The tar files: members of a sample and their names.

A sample has two members: ``KEY.jpg`` (or another image extension) and ``KEY.cls``, the label as decimal text. KEY is the
image's path within its split; all characters except letters, digits and ``/ - _ ~`` are percent-encoded, because WebDataset
ends a key at the first dot and ASCII is independent of the locale. Times, owners and modes are constant.
"""

from __future__ import annotations

import io
import os
import tarfile
from urllib.parse import quote_from_bytes, unquote_to_bytes

BLOCK = 512
END = bytes(2 * BLOCK)
_LABEL = "cls"
_MTIME = 946_684_800  # 2000-01-01; tar warns about files from 1970


def key(path: str) -> str:
    """KEY of the image with this path (relative, separated by ``/``)."""
    quoted = quote_from_bytes(os.fsencode(path), safe="/").replace(".", "%2E")
    # WebDataset reserves names that start with two underscores.
    return "%5F" + quoted[1:] if quoted.startswith("__") else quoted


def path_of(member: str) -> str:
    """The inverse of `key`: the image path of a member name."""
    # Damaged headers can contain invalid UTF-8, which tarfile decodes to surrogates.
    return os.fsdecode(unquote_to_bytes(member.split(".", 1)[0].encode("utf-8", "surrogateescape")))


def header(name: str, length: int) -> bytes:
    """The header blocks of a member of ``length`` bytes."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = length, _MTIME, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)


def head(name: str) -> int:
    """Size in bytes of `header` for this ASCII name."""
    return BLOCK if len(name) <= tarfile.LENGTH_NAME else len(header(name, 0))


def label(key: str, number: int) -> bytes:
    """The label member of ``key``: header, label and padding."""
    text = str(number).encode()
    return header(f"{key}.{_LABEL}", len(text)) + text + padding(len(text))


def padding(length: int) -> bytes:
    """The zero bytes after a member of this length."""
    return bytes(-length % BLOCK)


def member_name(blocks: bytes | memoryview) -> str:
    """The name in these header blocks; empty if they are damaged."""
    try:
        with tarfile.open(fileobj=io.BytesIO(blocks), mode="r:") as opened:
            first = opened.next()
            return first.name if first is not None else ""
    except tarfile.TarError:
        return ""


def beginning(identity: str) -> bytes:
    """The start of a shard: its identity (64 hex digits) in a pax comment, which tar readers ignore."""
    return _BEGINNING.replace(_PLACEHOLDER, identity.encode())


_PLACEHOLDER = b"0" * 64
_BEGINNING = tarfile.TarInfo.create_pax_global_header({"comment": f"worldsize {_PLACEHOLDER.decode()}"})
BEGINNING = len(_BEGINNING)
