"""Reads the output of all ranks of a job from a file that grows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from worldsize.jobs.folder import tail
from worldsize.jobs.state import Line

# Lines with a rank: of worldsize's agent, of srun --label, and of mpirun --tag-output.
_RANKED = re.compile(r"(?:\[(\d+)\] ?| *(\d+): ?|\[\d+,(\d+)\]<std(?:out|err)>: ?)(.*)", re.DOTALL)
_END_BYTES = 8192


class LogFile:
    """Reads what is appended to a file, which need not exist yet; a last line without an end waits for its end."""

    def __init__(self, path: Path, source: str, offset: int = 0) -> None:
        self._path = path
        self._source = source
        self._offset = offset
        self._rest = b""

    def new(self) -> Iterator[Line]:
        """The lines that were completed since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            yield parsed(line.decode("utf-8", "replace"), self._source)


def parsed(text: str, source: str) -> Line:
    """A line of output, with its rank if it begins with one."""
    match = _RANKED.fullmatch(text)
    if match is None:
        return Line(source, None, text)
    return Line(source, int(match[1] or match[2] or match[3]), match[4])


def last_lines(log: Path) -> str:
    """The last ten lines of a file; empty if it cannot be read."""
    return "\n".join(tail(log, _END_BYTES).splitlines()[-10:])
