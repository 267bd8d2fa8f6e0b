"""Transfer a tree of files through a pipe, with the same code at both ends.

The source of this file is sent to the pod and runs there, so it supports Python 3.9 and imports only the standard
library. A message is one byte of type, the length, and the content: J is JSON, D is a chunk of a tar stream. The sender
ends a stream with a J that holds its SHA-256, so a truncated or damaged stream is always detected. `kubectl cp` is not used:
it needs kubectl on this machine and tar in the container, and has no checksum.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

# Of this form only: in the pod, `LOADER` provides this module, and the packages around it do not exist.
from worldsize.cluster.storage.placing import Failed as Failed
from worldsize.cluster.storage.placing import check, destination, move_into_place, run_state, walk

# The container runs this. It reads the sources of `placing` and of this module from stdin; the arguments are their lengths
# in bytes. Files of the working folder, which may be the volume, must not replace modules.
LOADER = (
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); from types import ModuleType; "
    "read = lambda length: sys.stdin.buffer.read(int(length)); name = 'worldsize.cluster.storage.placing'; "
    "placing = sys.modules[name] = ModuleType(name); "
    "exec(compile(read(sys.argv[1]), 'placing.py', 'exec'), vars(placing)); "
    "exec(compile(read(sys.argv[2]), 'transfer.py', 'exec'), {'__name__': '__main__'})"
)
SOURCES = ("placing.py", "transfer.py")

_HEADER = struct.Struct(">cI")
_CHUNK = 1 << 18
_HEARTBEAT_S = 5.0
_MAX_NAMES = 10  # per message


class Messages:
    """Messages over a pipe: ``read(n)`` returns exactly n bytes or raises, ``write`` writes everything."""

    def __init__(self, read: Callable[[int], bytes], write: Callable[[bytes], Any]) -> None:
        self._read = read
        self._write = write

    def send(self, **fields: Any) -> None:
        """Send a JSON message."""
        self.send_chunk(json.dumps(fields).encode(), b"J")

    def send_chunk(self, chunk: bytes, kind: bytes = b"D") -> None:
        """Send a chunk of the stream."""
        self._write(_HEADER.pack(kind, len(chunk)) + chunk)

    def receive(self) -> dict[str, Any] | bytes:
        """The next message: a JSON object, or a chunk of the stream.

        Raises:
            Failed: the other end reports an error.
        """
        kind, length = _HEADER.unpack(self._read(_HEADER.size))
        if kind not in (b"D", b"J"):
            raise Failed("received a message that this program did not send")
        content = self._read(length)
        if kind == b"D":
            return content
        fields = json.loads(content)
        if "error" in fields:
            raise Failed(fields["error"], fields["user_error"])
        return dict(fields)

    def receive_fields(self) -> dict[str, Any]:
        """The next message, which must be JSON."""
        message = self.receive()
        assert isinstance(message, dict), "expected JSON, received a chunk"
        return message


def scan(root: Path, heartbeat: Callable[..., Any] = lambda **_: None) -> dict[str, int]:
    """Number of ``files``, their ``bytes``, and roughly the bytes of the ``stream``; ``heartbeat`` gets interim results."""
    files = size = stream = 0
    reported = time.monotonic()
    for _, path in walk(root):
        with contextlib.suppress(FileNotFoundError):
            info = path.lstat()
            stream += tarfile.BLOCKSIZE
            if stat.S_ISREG(info.st_mode):
                files, size = files + 1, size + info.st_size
                stream += -(-info.st_size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if time.monotonic() - reported > _HEARTBEAT_S:
            reported = time.monotonic()
            heartbeat(files=files, bytes=size, stream=stream)
    return {"files": files, "bytes": size, "stream": stream}


def pack(root: Path, messages: Messages, advance: Callable[[int], Any] = lambda _: None, skip: int = 0) -> dict[str, Any]:
    """Send the tree. Skips links that point outside it, and anything that is neither a file nor a folder.

    Args:
        advance: called with the number of bytes sent.
        skip: bytes at the start of the stream that the receiver already has.

    Returns:
        The last message: ``sha256`` of the stream, ``files``, ``bytes``, and ``skipped``: names with the reason.
    """
    stream = _Outgoing(messages, advance, skip)
    files = size = 0
    skipped = []
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as tar:  # type: ignore[call-overload]
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
                reason = "deleted during the transfer" if isinstance(error, FileNotFoundError) else str(error)
                if path == root:
                    raise Failed(f"{root}: {reason}", user_error=True) from None
                skipped.append(f"{name} ({reason})")
            tar.members.clear()  # tarfile would keep every entry in memory
    return {"sha256": stream.digest.hexdigest(), "files": files, "bytes": size, "skipped": skipped}


def unpack(
    receive: Callable[[], dict[str, Any] | bytes],
    target: Path,
    replace: bool,
    advance: Callable[[int], Any] = lambda _: None,
) -> dict[str, Any]:
    """Receive a tree as ``target``, which appears complete and verified, or not at all.

    Args:
        receive: returns the next message.
        replace: whether existing files may be overwritten; other files in an existing folder ``target`` stay, except in a
            run folder, which is replaced as a whole.
        advance: called with the number of bytes received.

    Returns:
        The sender's last message.
    """
    scratch = Path(tempfile.mkdtemp(prefix=".worldsize-", suffix=".part", dir=target.parent))
    try:
        stream = _Incoming(receive, advance)
        try:
            _extract(stream, scratch / "new")
        except tarfile.TarError as error:
            raise Failed(f"the stream is damaged: {error}") from None
        fields = stream.finish()
        move_into_place(scratch / "new", target, replace)
        return fields
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def points_inside(name: str, link: str) -> bool:
    """Whether a link at ``name`` points inside its tree, wherever the other links of the tree point.

    That is: it first goes up, no further than the root of the tree, and then only down.
    """
    parts = link.split("/")
    up = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return link != "" and not link.startswith("/") and ".." not in parts[up:] and up <= name.count("/")


class _Outgoing:
    """File-like object that sends what tarfile writes."""

    def __init__(self, messages: Messages, advance: Callable[[int], Any], skip: int) -> None:
        self._messages = messages
        self._advance = advance
        self._skip = skip
        self.digest = hashlib.sha256()

    def write(self, chunk: bytes) -> int:
        self.digest.update(chunk)
        new = chunk[self._skip :]
        self._skip -= len(chunk) - len(new)
        if new:
            self._messages.send_chunk(new)
            self._advance(len(new))
        return len(chunk)


class _Incoming:
    """File-like object from which tarfile reads what is received."""

    def __init__(self, receive: Callable[[], dict[str, Any] | bytes], advance: Callable[[int], Any]) -> None:
        self._receive = receive
        self._advance = advance
        self._digest = hashlib.sha256()
        self._buffer = b""
        self._end: dict[str, Any] | None = None

    def read(self, count: int) -> bytes:
        while not self._buffer and self._end is None:
            message = self._receive()
            if isinstance(message, dict):
                self._end = message
            else:
                self._digest.update(message)
                self._advance(len(message))
                self._buffer = message
        chunk, self._buffer = self._buffer[:count], self._buffer[count:]
        return chunk

    def finish(self) -> dict[str, Any]:
        """Read to the end, verify the checksum and return the sender's last message."""
        while self.read(_CHUNK):
            pass
        assert self._end is not None
        if self._end["sha256"] != self._digest.hexdigest():
            raise Failed("the checksum of the received data does not match; retry")
        return self._end


def _entry(name: str, path: Path) -> tarfile.TarInfo:
    """The tar header of one path; raises ValueError with the reason if it cannot be sent."""
    info = path.lstat()
    entry = tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(info.st_mode)
    entry.mtime = int(info.st_mtime)  # a fraction would take two more tar blocks
    if stat.S_ISDIR(info.st_mode):
        entry.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(info.st_mode):
        entry.type = tarfile.SYMTYPE
        entry.linkname = str(path.readlink())
        if not points_inside(name, entry.linkname):
            raise ValueError("link that points outside the tree")
    elif not stat.S_ISREG(info.st_mode):
        raise ValueError("neither a file nor a folder")
    return entry


def _extract(stream: _Incoming, root: Path) -> None:
    """Write the tree. Links are created last, so nothing is written through a link."""
    links = []
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK) as tar:  # type: ignore[call-overload]
        while (entry := tar.next()) is not None:
            tar.members.clear()
            if entry.name.startswith("/") or ".." in entry.name.split("/"):
                raise Failed(f"refused: {entry.name!r} would be written outside the target")
            path = root / entry.name
            if entry.isdir():
                path.mkdir()
            elif entry.issym() and path != root and points_inside(path.relative_to(root).as_posix(), entry.linkname):
                links.append((path, entry.linkname))
                continue
            elif entry.isreg():
                with open(path, "xb") as file:
                    shutil.copyfileobj(tar.extractfile(entry), file, _CHUNK)
                with contextlib.suppress(OSError):
                    os.utime(path, (entry.mtime, entry.mtime))
            else:
                raise Failed(f"refused: {entry.name!r} is neither a file, a folder nor a link inside the tree")
            # Not every file system supports modes. The owner always gets read and write permission.
            with contextlib.suppress(OSError):
                path.chmod(entry.mode & 0o777 | (0o700 if entry.isdir() else 0o600))
    for path, link in links:
        # No real tree has an entry below a link. This one would be created elsewhere, and may point outside from there.
        if any(folder.is_symlink() for folder in path.parents if root in folder.parents):
            raise Failed(f"refused: {path.relative_to(root).as_posix()!r} would be written through a link")
        path.symlink_to(link)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Pod side: answer one request, then wait until the other end disconnects.

    The last output of a container can be lost if its process exits before the output was read.
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
        request = messages.receive_fields()
        volume = Path(request["root"]).resolve()
        try:
            messages.send(**{"ls": _ls, "get": _get, "put": _put}[request["do"]](volume, request, messages))
        except Failed as error:
            # Paths as the user writes them: from the root of the volume.
            messages.send(error=str(error).replace(f"{volume}/", "/"), user_error=error.user_error)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            path = str(error.filename or "").replace(str(volume), "", 1)
            messages.send(error=": ".join(filter(None, (path, error.strerror or str(error)))), user_error=False)
        while source.read(_CHUNK):
            pass


def _ls(volume: Path, request: dict[str, Any], messages: Messages) -> dict[str, Any]:
    path = _existing(volume, request["path"])
    entries = []
    for entry in sorted(path.iterdir()) if path.is_dir() else [path]:
        with contextlib.suppress(FileNotFoundError):
            info = entry.lstat()
            link = str(entry.readlink()) if stat.S_ISLNK(info.st_mode) else ""
            entries.append([entry.name, stat.S_ISDIR(info.st_mode), info.st_size, info.st_mtime, link])
    return {"entries": entries}


def _get(volume: Path, request: dict[str, Any], messages: Messages) -> dict[str, Any]:
    path = _existing(volume, request["path"])
    totals = scan(path, lambda **progress: messages.send(scanned=False, **progress))
    messages.send(scanned=True, run=run_state(path), **totals)
    return pack(path, messages, skip=request["skip"])


def _put(volume: Path, request: dict[str, Any], messages: Messages) -> dict[str, Any]:
    named, as_folder = request["path"], request["path"].endswith("/")
    path = destination(_inside(volume, named), request["name"], request["run"], as_folder)
    check(path, request["run"], request["replace"])
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent)
    if free.total and free.free < request["bytes"]:
        raise Failed(f"not enough space: {request['bytes']:,} bytes needed, {free.free:,} free", user_error=True)
    messages.send(ready=True)
    unpack(messages.receive, path, request["replace"])
    return {"path": _from_root(volume, path)}


def _inside(volume: Path, path: str) -> Path:
    """The requested path with links resolved; must be inside the volume."""
    real = (volume / path.lstrip("/")).resolve()
    if real != volume and volume not in real.parents:
        raise Failed(f"{path} is a link that points outside the volume", user_error=True)
    return real


def _existing(volume: Path, path: str) -> Path:
    real = _inside(volume, path)
    if real.exists():
        return real
    parent = next(folder for folder in real.parents if folder.is_dir())
    names = sorted(entry.name for entry in parent.iterdir())
    existing = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "") if names else "nothing"
    raise Failed(f"{path} does not exist; {_from_root(volume, parent)} contains: {existing}", user_error=True)


def _from_root(volume: Path, path: Path) -> str:
    """The path as the user writes it: relative to the root of the volume."""
    return f"/{path.relative_to(volume).as_posix()}" if path != volume else "/"


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
