"""One run, one training: the file ``lock`` of a run folder, which rank 0 holds while it trains.

Two signs show that another process trains the run:

- A POSIX record lock (``fcntl.lockf``) on the file. The kernel releases it when its process ends, however that happens. NFS
  has such locks too, so they also count between hosts: the server releases those of a host that is gone.
- The record in the file: host, process, since when, and a count that grows every `BEAT_S` seconds. It counts where locks
  do not reach: file systems without locks (many object stores), or with locks of one host only (NFS with ``nolock``). A
  record of another host whose count has not grown for `SILENCE_S` seconds is of a dead process. A run that ends empties it.

The file stays, because deleting it would let two processes lock two files of the same name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from worldsize.errors import RunInUse, UserError, only_readable
from worldsize.runs import atomic

log = logging.getLogger(__name__)

BEAT_S = 5.0
SILENCE_S = 30.0  # several beats, and longer than file attributes are usually cached
PATIENCE_S = 60.0  # of a scheduler's restart: its predecessor may still be saving
_POLL_S = 0.2
_RECORD_BYTES = 1024
_HELD = (errno.EACCES, errno.EAGAIN)


@dataclass(frozen=True)
class Holder:
    """Who trains a run.

    ``since`` is in seconds since 1970. ``machine`` identifies the running kernel, ``space`` its namespace of process ids,
    ``begun`` when the process began; they are empty where they are unknown. ``beats`` grows while the process lives.
    """

    host: str
    pid: int
    since: float
    machine: str
    space: str
    begun: str
    token: str
    beats: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


class RunLock:
    """Context manager around a training; `acquire` locks the run, the end of the block releases it."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._path: Path | None = None
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
        if self._file is not None:
            with suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)

    def acquire(self, path: Path, wait: bool = False) -> None:
        """Lock with the file ``path``.

        Args:
            wait: another process may be about to end: wait up to `PATIENCE_S` seconds for it.

        Raises:
            UserError: another process trains the run. Names it.
            RunInUse: the same, after waiting.
            OSError: the disk is full; or the file cannot be opened, for another reason than that it is read-only: nobody
                trains there.
        """
        until = time.monotonic() + (PATIENCE_S if wait else 0.0)
        while (other := self._taken(path)) is not None:
            if time.monotonic() >= until:
                gone = "" if other.machine == _machine() else f". If {other.host} is gone for good, delete {path}"
                raise (RunInUse if wait else UserError)(
                    f"{path.parent} is being trained by {other}. Two processes must not train one run: wait for its end or "
                    f"stop it, or start a new run{gone}"
                )
            time.sleep(_POLL_S)
        if self._file is None:
            return
        self._path = path
        self._beating = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._beating.start()

    def taken_over(self) -> bool:
        """Whether another file has taken the place of the one that this process has locked: with it, another process trains.

        Raises:
            OSError: of the disk.
        """
        if self._file is None or self._path is None:
            return False
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                return False
        except FileNotFoundError:
            return False
        # Not sure yet: some file systems of object stores give a file another number.
        holder = _read(self._path)
        return holder is not None and holder.token != self._own.token

    def _taken(self, path: Path) -> Holder | None:
        """Who has the lock; None if this process has it now."""
        before = _read(path)
        # Records of this machine need no waiting: its own locks, or the process id, show whether the process lives.
        if before is not None and before.machine != _machine() and _lives(path, before):
            return before
        # From here on the file must not be opened again: closing it would release the lock.
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if only_readable(error):
                return None
            raise
        try:
            supported = _lock(file)
        except BlockingIOError:
            os.close(file)
            return _read(path) or before or Holder("an unknown host", 0, time.time(), "", "", "", "")
        found = _parsed(os.pread(file, _RECORD_BYTES, 0))
        if found is not None and not _is_past(path, found, before, supported):
            os.close(file)
            return found
        self._own = _this_process()
        try:
            with atomic.naming(path):
                _write(file, self._own)
        except OSError:
            os.close(file)
            raise
        self._file = file
        if not supported:
            return self._without_locks(path)
        return None

    def _without_locks(self, path: Path) -> Holder | None:
        """Whether another process has written its record at the same time: the last one wins."""
        log.warning("%s: this file system has no locks; a second process is only noticed by the record in this file", path)
        time.sleep(2 * _POLL_S)
        now = _read(path)
        if now is None or now.token == self._own.token:
            return None
        assert self._file is not None
        os.close(self._file)
        self._file = None
        return now

    def _beat(self) -> None:
        assert self._file is not None
        own = self._own
        while not self._ended.wait(BEAT_S):
            own = replace(own, beats=own.beats + 1)
            with suppress(OSError):  # whoever needs the disk reports it
                _write(self._file, own)


def _is_past(path: Path, found: Holder, before: Holder | None, locked: bool) -> bool:
    """Whether the process of the record ``found`` has ended.

    Args:
        before: the record before this process locked the file.
        locked: this process has a lock.
    """
    if found.machine != _machine():
        return found == before  # which has not changed for `SILENCE_S` seconds
    if locked:
        return True  # or it would have the lock
    if found.space == _space() and found.begun:
        return _begun(found.pid) != found.begun
    return not _lives(path, found)


def _lock(file: int) -> bool:
    """Lock the file. Returns whether its file system has locks.

    Raises:
        BlockingIOError: another process has locked it.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise BlockingIOError(error.errno, "locked") from None
        return False
    return True


def _lives(path: Path, holder: Holder) -> bool:
    """Whether the record's count grows. Returns after `SILENCE_S` seconds at most."""
    until = time.monotonic() + SILENCE_S
    while time.monotonic() < until:
        # Opened each time: network file systems ask the server when a file is opened.
        if (now := _read(path)) != holder:
            return now is not None
        time.sleep(_POLL_S)
    log.warning("the process that trained %s has ended without a trace: %s", path.parent, holder)
    return False


def _this_process() -> Holder:
    pid = os.getpid()
    return Holder(socket.gethostname(), pid, time.time(), _machine(), _space(), _begun(pid), uuid.uuid4().hex)


def _machine() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _space() -> str:
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _begun(pid: int) -> str:
    """When the process began, in ticks of its machine; empty if there is none."""
    with suppress(OSError, IndexError):
        # The name, in parentheses, may contain anything. The 22nd field of all is the 20th after it.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


def _read(path: Path) -> Holder | None:
    """The record in the file; None if there is none. Not of a file that this process has locked: that would release it."""
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return None


def _parsed(content: bytes) -> Holder | None:
    with suppress(ValueError, TypeError):
        return Holder(**json.loads(content))
    return None


def _write(file: int, holder: Holder) -> None:
    # Always of one length, so that a reader does not see parts of two records.
    os.pwrite(file, json.dumps(asdict(holder)).encode().ljust(_RECORD_BYTES - 1) + b"\n", 0)
