"""The errors that end a run, and the exit code of each.

=====  ==========================================================================
code   meaning
=====  ==========================================================================
0      success
1      ``prove``, ``replay``, ``audit`` or ``export``: what it verifies does not hold;
       ``compare``: results differ
64     user error: recipe, command line, folder or name; fix it first (do not retry)
65     data error: more broken images than the recipe allows, or one that changed during the run
66     checkpoint error: no intact checkpoint or export (any more), or it belongs to another run
       or network
69     a process did not connect or was lost, a disk or store does not answer, or another
       process still trains the run of ``--autoresume`` (retry)
70     internal error in worldsize or in a library (the traceback is in the log)
71     no progress: restarted again and again without a new checkpoint (``--autoresume``)
72     a process hung; the message names it (retry)
73     the weights of the processes differ, because of a fault of one's machine (retry)
74     the last state could not be saved (disk full); older checkpoints are intact
75     stopped by a signal or Ctrl-C after saving; continue with ``--resume`` (retry)
76     the loss is NaN or infinite
130    second Ctrl-C: exited immediately (138: second SIGUSR1, 143: second SIGTERM)
137    a process was killed, most likely because memory was full (retry); as in a shell, 128 plus the
       number of the signal
141    the reader of the output left before its end (``| head``)
=====  ==========================================================================

The numbers follow BSD's sysexits.h where it has a name for the case, so that a Kubernetes
``podFailurePolicy`` or a batch script can distinguish "retry" (75) from "fix it first" (64).

Commands that submit, follow or check a job on a cluster add these codes:

=====  ==========================================================================
code   meaning
=====  ==========================================================================
0      the job succeeded
1      the job failed; or a cluster, registry or image build error
2      preflight found an error; no job was submitted
3      ``--timeout`` expired; the job keeps running
130    detached with Ctrl-C; the job keeps running
=====  ==========================================================================
"""

from __future__ import annotations

import difflib
import errno
import os
import resource
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

SUCCESS = 0
# What a command verifies does not hold, or compares is not equal; or a job on a cluster failed.
FAILED = 1
# Of a job on a cluster.
PREFLIGHT_FAILED = 2
TIMED_OUT = 3
DETACHED = 130
# A process that a signal ended exits with this plus the signal's number, as in a shell.
SIGNAL_BASE = 128
INTERNAL_ERROR = 70


class WorldsizeError(Exception):
    """Base of all errors whose message is written for the user."""

    exit_code = INTERNAL_ERROR
    # Whether it may have happened on this rank only, so that the others do not know of it and wait for this one.
    of_one_rank = False


class ServiceFailed(WorldsizeError):
    """A cluster, a scheduler, a registry or a builder failed, or refused a request."""

    exit_code = FAILED


class UserError(WorldsizeError):
    """An invalid request. The message names what is wrong, where, and what would be valid."""

    exit_code = 64


class GpuFull(UserError):
    """A GPU's memory is too small. The message says for what, and what to change."""

    of_one_rank = True


class DataError(WorldsizeError):
    """The dataset is too damaged to train on."""

    exit_code = 65


class DataChanged(DataError):
    """A file of the dataset changed, or was deleted, while the run trained on it."""

    of_one_rank = True


class CheckpointError(WorldsizeError):
    """No intact checkpoint, or one that does not belong to this model."""

    exit_code = 66


class Unavailable(WorldsizeError):
    """Something that the run needs is missing for now: a later try may succeed."""

    exit_code = 69


class PeersUnreachable(Unavailable):
    """The other processes did not connect, or left during startup."""


class PeerLost(PeersUnreachable):
    """The connection to another process broke, or nothing came from it. What happened there is the cause."""

    of_one_rank = True


class NcclFailed(PeerLost):
    """NCCL reported an error on this rank."""


class RunInUse(Unavailable):
    """Another process trains the run that a scheduler starts again; it may end soon."""


class StoreUnreachable(Unavailable):
    """A disk or a remote store does not answer, or stopped answering."""


class ReadFailed(StoreUnreachable):
    """A read of this rank failed again and again, because of the place that it reads from."""

    of_one_rank = True


class Forbidden(UserError):
    """This rank may not read a file."""

    of_one_rank = True


class NoProgress(WorldsizeError):
    """Several starts in a row ended before the next checkpoint."""

    exit_code = 71


class Stalled(WorldsizeError):
    """A process hung, so that the run could not continue."""

    exit_code = 72


class ReplicasDiffer(WorldsizeError):
    """The weights of two ranks differ that must be equal; the checkpoint before that is good."""

    exit_code = 73


class NotSaved(WorldsizeError):
    """The last state could not be written; older checkpoints are intact."""

    exit_code = 74


class Stopped(WorldsizeError):
    """A signal asked the run to stop; everything up to the last step is saved."""

    exit_code = 75


class Diverged(WorldsizeError):
    """The loss is NaN or infinite."""

    exit_code = 76


# Non-retryable: the same run would fail in the same way.
PERMANENT = frozenset(kind.exit_code for kind in (UserError, DataError, CheckpointError, NoProgress, NotSaved, Diverged))


def first_line(error: BaseException) -> str:
    """The first line of the exception's message, at most 300 characters; the exception's type if it has no message."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


# Errors of a disk, a network or a limit of this process, which may be gone at the next try.
_OF_THE_PLACE = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "EREMOTEIO", "EUCLEAN", "EBADMSG", "ESTALE", "ETIMEDOUT", "ENOMEDIUM", "ENOLINK"),
        *("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "EAGAIN", "EBUSY", "EINTR", "EKEYEXPIRED", "ECOMM", "EPROTO"),
        *("ENOTCONN", "ESHUTDOWN", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
    )
    if hasattr(errno, name)
)


def of_the_place(error: OSError) -> bool:
    """Whether the error says nothing about the file, only about the disk, the network or this process."""
    return error.errno in _OF_THE_PLACE


def of_system(message: str, error: OSError) -> WorldsizeError:
    """What to raise for an error of the system: retryable (`StoreUnreachable`) or not (`UserError`)."""
    return StoreUnreachable(message) if of_the_place(error) else UserError(message)


def unanswered(error: BaseException) -> str | None:
    """What to say if a file could not be used because of its disk, the network or a limit; None: it is another error."""
    if isinstance(error, OSError) and error.filename is not None and of_the_place(error):
        limit = error.errno in (errno.EMFILE, errno.ENFILE)
        return f"{error.filename}: {error.strerror}{'; raise the limit of open files (ulimit -n)' if limit else ''}"
    return None


# Python's message for threads, and C++'s (std::system_error), which torch passes on.
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")


def no_process(error: BaseException) -> str | None:
    """What to say if no further thread or process may start; None: it is another error."""
    if isinstance(error, BlockingIOError) or (isinstance(error, RuntimeError) and first_line(error) in _NO_THREAD):
        return (
            f"cannot start another thread or process: {first_line(error)}. Raise the limit of processes (ulimit -u; of a "
            "container, its limit of process ids) or of memory, or lower --procs and --data.workers"
        )
    return None


# C++'s, the dynamic linker's, torch's and the system's messages.
_NO_MEMORY = ("std::bad_alloc", "failed to map segment", "can't allocate memory", "Cannot allocate memory")


def no_memory(error: BaseException) -> str | None:
    """What to say if this process gets no more memory of the machine; None: it is another error."""
    lines = [line for line in str(error).splitlines() if any(text in line for text in _NO_MEMORY)]
    told = isinstance(error, MemoryError) or (isinstance(error, (RuntimeError, ImportError, OSError)) and lines)
    if not told and not _lost_for_memory(error):
        return None
    reason = lines[0].strip()[:300] if lines else first_line(error)
    remedy = "Raise the limit of memory (ulimit -v), or lower --procs, --micro-batch or --data.workers"
    return f"out of memory: {reason}. {remedy}"


def _lost_for_memory(error: BaseException) -> bool:
    """Whether it is that of an import at the limit of this process's memory: libraries lose the MemoryError behind it."""
    importing = any(frame.f_code.co_name == "<module>" for frame, _ in traceback.walk_tb(error.__traceback__))
    limit, status = resource.getrlimit(resource.RLIMIT_AS)[0], Path("/proc/self/status")
    if not importing or limit == resource.RLIM_INFINITY or not status.exists():
        return False
    return limit < 2**28 + 1024 * int(status.read_text().split("VmPeak:")[1].split()[0])


_SHOWN = 60  # characters of a path that is too long
# What whoever runs a command can change: a disk is full, or takes no files, or none of this size.
_UNWRITABLE = frozenset(getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EROFS", "EFBIG") if hasattr(errno, name))


def unwritable(error: BaseException, path: Path | None = None) -> str | None:
    """What to say if the error is that of a disk that takes nothing more; None: it is another error.

    Args:
        path: what was written, for an error that names no file.
    """
    writing = "cannot write" if path is None else f"cannot write {path}"
    if isinstance(error, OSError):
        return f"{error.filename or writing}: {error.strerror}" if error.errno in _UNWRITABLE else None
    # safetensors raises its own error, whose text has the number.
    reason = first_line(error)
    return f"{writing}: {reason}" if any(f"(os error {number})" in reason for number in _UNWRITABLE) else None


def only_readable(error: OSError) -> bool:
    """Whether writing is refused since this user may only read there: no fault where writing only saves work."""
    return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


def named_in(error: OSError) -> str | None:
    """The path to name for the error: its own, or a folder above it if this process may not enter that one.

    Whether a file exists in such a folder is unknown.
    """
    path = error.filename
    if isinstance(error, PermissionError) and isinstance(path, (str, os.PathLike)):
        closed = (up for up in reversed(Path(path).parents) if up.is_dir() and not os.access(up, os.X_OK))
        return str(next(closed, path))
    return path


def forbidden(error: BaseException) -> str | None:
    """What to say if permissions forbid a file, such as in a run of another user; None: it is another error."""
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{named_in(error)}: {error.strerror}; check its permissions and those of its folder"
    return None


def refuse_closed(folder: Path) -> None:
    """Do nothing unless a folder cannot be entered: to `Path.exists` and others, it is empty since Python 3.14.

    Raises:
        OSError: of ``folder``, such as PermissionError; not if there is no such folder.
    """
    try:
        os.stat(os.path.join(folder, "."))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def no_path(error: BaseException) -> str | None:
    """What to say if a text that was passed as a path cannot be one; None: it is another error."""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        return f"{name[:_SHOWN]}...: {error.strerror} ({len(name):,} characters)"
    if isinstance(error, ValueError) and ("null byte" in str(error) or "null character" in str(error)):
        return "a path or a name contains a NUL character"
    return None


def not_installed(error: BaseException) -> str | None:
    """What to say if a library that worldsize itself imports is missing; None: it is another error."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None or error.name.startswith("worldsize"):
        return None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parent):
        return None
    return (
        f"{sys.executable} has no module {error.name}, which worldsize requires: install worldsize with its dependencies "
        "there (python -m pip install worldsize), or use the Python of its virtual environment"
    )


def explained(error: BaseException) -> WorldsizeError | None:
    """The error to end with in place of one of the system or of Python; None: there is no better one."""
    if (problem := unanswered(error)) is not None:
        return StoreUnreachable(problem)
    if (problem := no_process(error) or no_memory(error)) is not None:
        return Unavailable(problem)
    problem = unwritable(error) or forbidden(error) or no_path(error) or not_installed(error)
    return None if problem is None else UserError(problem)


@contextmanager
def own_errors() -> Iterator[None]:
    """Around what a program calls; also a decorator: errors of the system become those that a command ends with."""
    try:
        yield
    except WorldsizeError:
        raise
    except Exception as error:
        found = explained(error)
        if found is None and isinstance(error, OSError):
            where = f"{error.filename}: " if error.filename is not None else ""
            found = of_system(no_current_folder() or f"{where}{error.strerror or error}", error)
        if found is None:  # it is the program's own
            raise
        raise found from error


def as_path(value: object, what: str) -> Path:
    """What a program passed as a path; a UserError if it is none, or empty, which would be the current folder."""
    if value == "":
        raise UserError(f"{what} is empty: pass a path, or '.' for the current folder")
    if isinstance(value, (str, os.PathLike)) and isinstance(path := os.fspath(value), str):
        return Path(path)
    raise UserError(f"{what} is {value!r}: pass a path as str or pathlib.Path, not bytes or another type")


def no_current_folder() -> str | None:
    """What to say if the current folder was deleted: libraries fail in it in ways that nobody understands."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return "the current folder does not exist any more: change to another one"
    return None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'train'?`` if a known word is close to ``word``, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
