"""Files that are written completely or not at all: under another name first, which is then replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around writing the file ``path``: an error of the disk that names no file, as that of a full one, names it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path, temporary: Path | None = None, durable: bool = False) -> Iterator[Path]:
    """Yields the path to write to, which becomes ``path`` at the end: a reader sees either the old or the new content.

    Args:
        temporary: the path to write to, on the same file system (default: next to ``path``). It is removed after an error.
        durable: the content survives a loss of power from then on.
    """
    written = temporary or path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with naming(path):
            yield written
            if durable:
                flush(written)
            os.replace(written, path)
    except BaseException:
        with suppress(OSError):
            written.unlink()
        raise
    if durable:
        flush(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, see `replacing`."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Write a text file atomically, see `replacing`."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_text(text, "utf-8")


def append(path: Path, text: str) -> None:
    """Append lines to a file: all of them or, if the disk has no room for all, nothing. Raises OSError.

    They do not continue a last line that a crash has cut, which would make both unreadable.
    """
    with naming(path), open(path, "a+b", buffering=0) as file:
        begin = file.seek(0, os.SEEK_END)
        file.seek(max(0, begin - 1))
        cut = file.read(1) not in (b"", b"\n")
        content = memoryview(("\n" * cut + text).encode())
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(begin)
            raise


def flush(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
