"""A tree of files through a pipe: the same code at both ends.

The text of this file is sent to the pod and runs there, so it needs Python 3.9 and imports nothing else. Messages go
both ways, each a letter, the length and the content: J is JSON, D a piece of a tar stream. Whoever sends a stream ends
it with a J that holds its SHA-256, so one that was cut short or damaged is never taken for whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import struct
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

# What a container is told to run: it reads this program's text, of so many bytes, from its stdin.
LOADER = (
    "import sys; text = sys.stdin.buffer.read(int(sys.argv[1])); "
    "exec(compile(text, 'transfer.py', 'exec'), {'__name__': '__main__'})"
)

_HEAD = struct.Struct(">cI")
_PIECE = 1 << 18
_HEARTBEAT_S = 5.0
_NAMED = 10  # names in one message, at most


class Failed(Exception):
    """The transfer cannot be, or broke off; ``mendable``: by the person who typed the command."""

    def __init__(self, message: str, mendable: bool = False) -> None:
        super().__init__(message)
        self.mendable = mendable


class Answered(Exception):
    """The other end has said something, or has left, before it was told everything."""


class Messages:
    """Messages over a pipe: ``read`` gives exactly so many bytes or raises, ``write`` takes all."""

    def __init__(self, read: Callable[[int], bytes], write: Callable[[bytes], Any]) -> None:
        self._read = read
        self._write = write

    def tell(self, **facts: Any) -> None:
        """Send facts."""
        self.pour(json.dumps(facts).encode(), b"J")

    def pour(self, piece: bytes, kind: bytes = b"D") -> None:
        """Send a piece of the stream."""
        self._write(_HEAD.pack(kind, len(piece)) + piece)

    def hear(self) -> dict[str, Any] | bytes:
        """The next message: facts, or a piece of the stream.

        Raises:
            Failed: the other end says that it cannot go on.
        """
        kind, length = _HEAD.unpack(self._read(_HEAD.size))
        if kind not in (b"D", b"J"):
            raise Failed("what comes is not of this program")
        content = self._read(length)
        if kind == b"D":
            return content
        facts = json.loads(content)
        if "error" in facts:
            raise Failed(facts["error"], facts["mendable"])
        return dict(facts)

    def facts(self) -> dict[str, Any]:
        """The next message, which is facts."""
        heard = self.hear()
        assert isinstance(heard, dict), "a piece where facts should be"
        return heard


def walk(root: Path) -> Iterator[tuple[str, Path]]:
    """(name inside the tree, path) of the root, which is ".", and of all below it; parents first, sorted."""
    yield ".", root
    for folder, folders, files in os.walk(root, onerror=_unless_gone):
        folders.sort()
        for name in sorted(folders + files):
            path = Path(folder, name)
            yield path.relative_to(root).as_posix(), path


def survey(root: Path, beat: Callable[..., Any] = lambda **_: None) -> dict[str, int]:
    """How many ``files`` there are, their ``bytes``, and about those of the ``stream``; ``beat`` is told so meanwhile."""
    files = size = stream = 0
    told = time.monotonic()
    for _, path in walk(root):
        with contextlib.suppress(FileNotFoundError):
            about = path.lstat()
            stream += tarfile.BLOCKSIZE
            if stat.S_ISREG(about.st_mode):
                files, size = files + 1, size + about.st_size
                stream += -(-about.st_size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if time.monotonic() - told > _HEARTBEAT_S:
            told = time.monotonic()
            beat(files=files, bytes=size, stream=stream)
    return {"files": files, "bytes": size, "stream": stream}


def pack(root: Path, messages: Messages, moved: Callable[[int], Any] = lambda _: None, skip: int = 0) -> dict[str, Any]:
    """Send the tree. Links that lead out of it, and what is neither file nor folder, are left out.

    Args:
        moved: is told how many bytes have been sent.
        skip: bytes at the stream's beginning that the other end has already.

    Returns:
        For the last message: ``sha256`` of the stream, ``files``, ``bytes``, and ``left_out``: names with the reason.
    """
    stream = _Outgoing(messages, moved, skip)
    files = size = 0
    left_out = []
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_PIECE) as tar:  # type: ignore[call-overload]
        for name, path in walk(root):
            try:
                entry = _entry(name, path)
                if entry.isreg():
                    with open(path, "rb") as file:
                        entry.size = os.fstat(file.fileno()).st_size
                        tar.addfile(entry, file)
                    files, size = files + 1, size + entry.size
                else:
                    tar.addfile(entry)
            except (FileNotFoundError, ValueError) as error:
                why = "gone meanwhile" if isinstance(error, FileNotFoundError) else str(error)
                if path == root:
                    raise Failed(f"{root}: {why}", mendable=True) from None
                left_out.append(f"{name} ({why})")
            tar.members.clear()  # it would keep them all
    return {"sha256": stream.digest.hexdigest(), "files": files, "bytes": size, "left_out": left_out}


def unpack(
    hear: Callable[[], dict[str, Any] | bytes], target: Path, replace: bool, moved: Callable[[int], Any] = lambda _: None
) -> dict[str, Any]:
    """Receive a tree as ``target``, which appears when all of it is there and right, or not at all.

    Args:
        hear: gives the next message.
        replace: whether files of ``target`` may be replaced; others in a folder of that name stay.
        moved: is told how many bytes have come.

    Returns:
        The sender's last message.
    """
    box = Path(tempfile.mkdtemp(prefix=".worldsize-", suffix=".part", dir=target.parent))
    try:
        stream = _Incoming(hear, moved)
        try:
            _extract(stream, box / "new")
        except tarfile.TarError as error:
            raise Failed(f"the stream is damaged: {error}") from None
        facts = stream.finish()
        _put_in_place(box / "new", target, replace)
        return facts
    finally:
        shutil.rmtree(box, ignore_errors=True)


def leads_inside(name: str, link: str) -> bool:
    """Whether a link called ``name`` in a tree leads to somewhere in that tree, wherever the tree's other links lead.

    So it may first go up, no further than the tree's root, and then only down.
    """
    steps = link.split("/")
    up = next((i for i, step in enumerate(steps) if step != ".."), len(steps))
    return link != "" and not link.startswith("/") and ".." not in steps[up:] and up <= name.count("/")


class _Outgoing:
    """The file that a tar stream is written to."""

    def __init__(self, messages: Messages, moved: Callable[[int], Any], skip: int) -> None:
        self._messages = messages
        self._moved = moved
        self._skip = skip
        self.digest = hashlib.sha256()

    def write(self, piece: bytes) -> int:
        self.digest.update(piece)
        new = piece[self._skip :]
        self._skip -= len(piece) - len(new)
        if new:
            self._messages.pour(new)
            self._moved(len(new))
        return len(piece)


class _Incoming:
    """The file that a tar stream is read from."""

    def __init__(self, hear: Callable[[], dict[str, Any] | bytes], moved: Callable[[int], Any]) -> None:
        self._hear = hear
        self._moved = moved
        self._digest = hashlib.sha256()
        self._left = b""
        self._end: dict[str, Any] | None = None

    def read(self, count: int) -> bytes:
        while not self._left and self._end is None:
            heard = self._hear()
            if isinstance(heard, dict):
                self._end = heard
            else:
                self._digest.update(heard)
                self._moved(len(heard))
                self._left = heard
        piece, self._left = self._left[:count], self._left[count:]
        return piece

    def finish(self) -> dict[str, Any]:
        """The sender's last message, once what came is what was sent."""
        while self.read(_PIECE):
            pass
        assert self._end is not None
        if self._end["sha256"] != self._digest.hexdigest():
            raise Failed("what came is not what was sent: the checksums differ; try again")
        return self._end


def _entry(name: str, path: Path) -> tarfile.TarInfo:
    """The tar header of one thing; a ValueError says why it cannot be sent."""
    about = path.lstat()
    entry = tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(about.st_mode)
    entry.mtime = int(about.st_mtime)  # a fraction would cost two more blocks
    if stat.S_ISDIR(about.st_mode):
        entry.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(about.st_mode):
        entry.type = tarfile.SYMTYPE
        entry.linkname = str(path.readlink())
        if not leads_inside(name, entry.linkname):
            raise ValueError("a link that leads elsewhere")
    elif not stat.S_ISREG(about.st_mode):
        raise ValueError("neither file nor folder")
    return entry


def _extract(stream: _Incoming, root: Path) -> None:
    """Write the tree. Links are made last, so nothing is written through one."""
    links = []
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_PIECE) as tar:  # type: ignore[call-overload]
        while (entry := tar.next()) is not None:
            tar.members.clear()
            if entry.name.startswith("/") or ".." in entry.name.split("/"):
                raise Failed(f"{entry.name!r} would be written elsewhere: refused")
            path = root / entry.name
            if entry.isdir():
                path.mkdir()
            elif entry.issym() and leads_inside(entry.name, entry.linkname):
                links.append((path, entry.linkname))
                continue
            elif entry.isreg():
                with open(path, "xb") as file:
                    shutil.copyfileobj(tar.extractfile(entry), file, _PIECE)
                with contextlib.suppress(OSError):
                    os.utime(path, (entry.mtime, entry.mtime))
            else:
                raise Failed(f"{entry.name!r} is neither file nor folder: refused")
            # Not every file system knows modes. The owner can always read and write.
            with contextlib.suppress(OSError):
                path.chmod(entry.mode & 0o777 | (0o700 if entry.isdir() else 0o600))
    for path, link in links:
        path.symlink_to(link)


def _put_in_place(new: Path, target: Path, replace: bool) -> None:
    if not os.path.lexists(target):
        new.rename(target)
        return
    if not replace:
        raise Failed(f"{target} exists already", mendable=True)
    moves = [(path, target / name) for name, path in walk(new)]
    for path, there in moves:
        if os.path.lexists(there) and _is_folder(path) != _is_folder(there):
            raise Failed(f"{there}: one is a folder and the other is not", mendable=True)
    for path, there in moves:
        if _is_folder(path):
            there.mkdir(stat.S_IMODE(path.lstat().st_mode), exist_ok=True)
        else:
            path.replace(there)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """The pod's side: answer one request, then stay until the other end has left.

    A container's last output may be lost if its process ends before it was read.
    """

    def read(count: int) -> bytes:
        content = source.read(count)
        if len(content) < count:
            raise EOFError
        return content

    def write(content: bytes) -> None:
        sink.write(content)
        sink.flush()

    messages = Messages(read, write)
    with contextlib.suppress(EOFError, BrokenPipeError):
        request = messages.facts()
        volume = Path(request["root"]).resolve()
        try:
            messages.tell(**{"ls": _ls, "get": _get, "put": _put}[request["do"]](volume, request, messages))
        except Failed as error:
            messages.tell(error=str(error), mendable=error.mendable)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            named = str(error.filename or "").replace(str(volume), "", 1)
            messages.tell(error=": ".join(filter(None, (named, error.strerror or str(error)))), mendable=False)
        while source.read(_PIECE):
            pass


def _ls(volume: Path, request: dict[str, Any], messages: Messages) -> dict[str, Any]:
    path = _existing(volume, request["path"])
    entries = []
    for one in sorted(path.iterdir()) if path.is_dir() else [path]:
        with contextlib.suppress(FileNotFoundError):
            about = one.lstat()
            link = str(one.readlink()) if stat.S_ISLNK(about.st_mode) else ""
            entries.append([one.name, stat.S_ISDIR(about.st_mode), about.st_size, about.st_mtime, link])
    return {"entries": entries}


def _get(volume: Path, request: dict[str, Any], messages: Messages) -> dict[str, Any]:
    path = _existing(volume, request["path"])
    messages.tell(surveyed=True, **survey(path, lambda **so_far: messages.tell(surveyed=False, **so_far)))
    return pack(path, messages, skip=request["skip"])


def _put(volume: Path, request: dict[str, Any], messages: Messages) -> dict[str, Any]:
    path = _inside(volume, request["path"])
    if path.is_dir() or request["path"].endswith("/"):
        path = path / request["name"]
    if os.path.lexists(path) and not request["replace"]:
        raise Failed(f"{_shown(volume, path)} exists already in the volume; --force replaces it", mendable=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent)
    if free.total and free.free < request["bytes"]:
        raise Failed(f"{request['bytes']:,} bytes do not fit: the volume has {free.free:,} free", mendable=True)
    messages.tell(ready=True)
    unpack(messages.hear, path, request["replace"])
    return {"path": _shown(volume, path)}


def _inside(volume: Path, path: str) -> Path:
    """The real path of what was asked for, which a link may not lead out of the volume."""
    real = (volume / path.lstrip("/")).resolve()
    if real != volume and volume not in real.parents:
        raise Failed(f"{path} is a link that leads out of the volume", mendable=True)
    return real


def _existing(volume: Path, path: str) -> Path:
    real = _inside(volume, path)
    if real.exists():
        return real
    above = next(folder for folder in real.parents if folder.is_dir())
    names = sorted(one.name for one in above.iterdir())
    there = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "") if names else "nothing"
    raise Failed(f"there is no {path}; {_shown(volume, above)} has: {there}", mendable=True)


def _shown(volume: Path, path: Path) -> str:
    """The path as the user writes it: from the volume's root."""
    return f"/{path.relative_to(volume).as_posix()}" if path != volume else "/"


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
