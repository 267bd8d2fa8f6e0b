"""The tar files: which members a sample has and what they are called.

A sample is two members, ``KEY.jpg`` (or what the picture is) and ``KEY.cls``, the label as decimal text. KEY is the
picture's path within its split, with everything but letters, digits, ``/ - _ ~`` written as %XX: WebDataset ends a key
at the first dot, and ASCII is the same under every locale. Times, owners and modes are fixed.
"""

from __future__ import annotations

import io
import os
import tarfile
from urllib.parse import quote_from_bytes, unquote_to_bytes

BLOCK = 512
END = bytes(2 * BLOCK)
_LABEL = "cls"
_STAMP = 946_684_800  # 2000-01-01: tar warns of files from 1970


def key(path: str) -> str:
    """KEY of the picture with this path (relative, with ``/`` between)."""
    quoted = quote_from_bytes(os.fsencode(path), safe="/").replace(".", "%2E")
    # WebDataset takes what begins with two underscores for its own.
    return "%5F" + quoted[1:] if quoted.startswith("__") else quoted


def path_of(member: str) -> str:
    """The inverse: the path that a picture's member is named after."""
    # Damaged headers can give bytes that are no UTF-8, which tarfile makes surrogates of.
    return os.fsdecode(unquote_to_bytes(member.split(".", 1)[0].encode("utf-8", "surrogateescape")))


def header(name: str, length: int) -> bytes:
    """The blocks before a member's ``length`` bytes."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = length, _STAMP, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)


def head(name: str) -> int:
    """Bytes of `header` for this ASCII name."""
    return BLOCK if len(name) <= tarfile.LENGTH_NAME else len(header(name, 0))


def label(key: str, number: int) -> bytes:
    """The member after the picture of KEY ``key``: header, label and padding."""
    text = str(number).encode()
    return header(f"{key}.{_LABEL}", len(text)) + text + padding(len(text))


def padding(length: int) -> bytes:
    """The bytes between the end of a member of this length and the next."""
    return bytes(-length % BLOCK)


def member_name(blocks: bytes | memoryview) -> str:
    """The name in the headers before a member; empty where they are damaged."""
    try:
        with tarfile.open(fileobj=io.BytesIO(blocks), mode="r:") as opened:
            first = opened.next()
            return first.name if first is not None else ""
    except tarfile.TarError:
        return ""


def beginning(identity: str) -> bytes:
    """What a shard begins with: its identity (64 letters), as a comment that every reader of tar files passes over."""
    return _BEGINNING.replace(_NOBODY, identity.encode())


_NOBODY = b"0" * 64
_BEGINNING = tarfile.TarInfo.create_pax_global_header({"comment": f"worldsize {_NOBODY.decode()}"})
BEGINNING = len(_BEGINNING)
