"""List, download and upload files on a volume."""

from __future__ import annotations

import posixpath
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import files as package_files
from pathlib import Path
from typing import Annotated, Any

import tyro

from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import Answered, ClusterError, Unreachable
from worldsize.cluster.manifests.spec import VOLUMES
from worldsize.cluster.options import Where
from worldsize.cluster.storage import file_pod, placing, transfer
from worldsize.cluster.storage.transfer import Messages
from worldsize.config import live_output
from worldsize.config.command_line import Flat
from worldsize.config.wording import printable
from worldsize.errors import UserError
from worldsize.jobs.terminal import note

_RemotePath = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="VOLUME:/PATH")]
_MAX_NAMES = 5  # per message
_RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before each retry
_SOURCES = [package_files("worldsize.cluster.storage").joinpath(name).read_bytes() for name in transfer.SOURCES]


@dataclass(frozen=True)
class PodOptions:
    """The pod that mounts the volume for one command and is then deleted."""

    image: str = ""
    """Container image of the pod; any with Python 3 works (default: that of the newest worldsize pod in the namespace)."""
    pull_secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Secret for pulling the container image."""
    fixed_user: bool = True
    """Run as user 1000 of the container image; --no-fixed-user leaves the user to the cluster, as OpenShift requires."""
    wait: float = 300.0
    """Seconds to wait for the pod to start."""


@dataclass(frozen=True)
class FilesList:
    """List a folder of a volume, or one file."""

    remote: _RemotePath
    """The volume and the path on it; VOLUME alone is its root."""
    pod: Flat[PodOptions] = field(default_factory=PodOptions)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True)
class FilesGet:
    """Download a file or a folder, recursively. It appears locally only when complete and its checksum verified."""

    remote: _RemotePath
    """The volume and the path on it."""
    local: Annotated[Path, tyro.conf.Positional] = Path()
    """Local destination; inside it if it is an existing folder. Missing folders are created."""
    force: bool = False
    """Overwrite existing local files; a run folder is replaced as a whole, unless it has steps that the copy lacks."""
    pod: Flat[PodOptions] = field(default_factory=PodOptions)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True)
class FilesPut:
    """Upload a file or a folder, recursively. It appears on the volume only when complete and its checksum verified."""

    local: Annotated[Path, tyro.conf.Positional]
    """Local file or folder."""
    remote: _RemotePath
    """The volume and the destination path on it; inside it if it is an existing folder. Missing folders are created."""
    force: bool = False
    """Overwrite existing files there; a run folder is replaced as a whole, unless it has steps that the copy lacks."""
    pod: Flat[PodOptions] = field(default_factory=PodOptions)
    where: Flat[Where] = field(default_factory=Where)


def show(options: FilesList, cluster: Cluster) -> int:
    """``worldsize cluster files ls``; for errors see `_connected`."""
    volume, path = parse(options.remote)
    with _connected(cluster, volume, options.pod, read_only=True) as request:
        entries = request(do="ls", path=path).receive_fields()["entries"]
    for line in listing(entries):
        print(line)
    return 0


def get(options: FilesGet, cluster: Cluster) -> int:
    """``worldsize cluster files get``; for errors see `_connected`.

    Raises:
        UserError: the target exists and --force is missing, or is a run with steps that the volume's lacks; a run would be
            inside another one's folder; or there is no space.
    """
    volume, path = parse(options.remote)
    name = posixpath.basename(path.rstrip("/")) or volume
    if not placing.is_run(options.local):  # otherwise it depends on what is on the volume
        _local_target(options, name, None)
    with _connected(cluster, volume, options.pod, read_only=True) as request:
        stream = ResumingStream(lambda skip: request(do="get", path=path, skip=skip))
        target = _local_target(options, name, stream.totals["run"])
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < stream.totals["bytes"]:
            raise UserError(f"not enough free space for {target}: {stream.totals['bytes']:,} bytes are needed")
        with _progress_bar(str(target), stream.totals["stream"]) as advance:
            summary = transfer.unpack(stream.receive, target, options.force, advance)
    _summarize(summary)
    print(printable(str(target)))
    return 0


def put(options: FilesPut, cluster: Cluster) -> int:
    """``worldsize cluster files put``; for errors see `_connected`.

    Raises:
        UserError: the target exists and --force is missing, or is a run with steps that the local one lacks; a run would be
            inside another one's folder; the source does not exist, or there is no space.
    """
    volume, path = parse(options.remote)
    local = options.local.resolve()
    name = options.local.name if options.local.is_symlink() else local.name
    if not local.exists():
        raise UserError(f"{options.local} does not exist")
    with _connected(cluster, volume, options.pod, read_only=False) as request:
        totals = transfer.scan(local)
        facts = {"name": name, "run": placing.run_state(local), "bytes": totals["bytes"]}
        messages = request(do="put", path=path, replace=options.force, **facts)
        messages.receive_fields()
        # If the pod ends the upload early, its response contains the reason.
        with suppress(Answered), _progress_bar(str(options.local), totals["stream"]) as advance:
            summary = transfer.pack(local, messages, advance)
            messages.send(**summary)
        remote = messages.receive_fields()
    _summarize(summary)
    print(printable(f"{volume}:{remote['path']}"))
    return 0


def _local_target(options: FilesGet, name: str, run: placing.RunState | None) -> Path:
    """Where a download goes; raises UserError if it must not."""
    try:
        target = placing.destination(options.local, name, run)
        placing.check(target, run, options.force)
    except transfer.Failed as error:
        raise UserError(printable(str(error))) from None
    return target


def parse(remote: str) -> tuple[str, str]:
    """Split VOLUME:/PATH; the path begins with "/", and ends with one if it must be a folder.

    Raises:
        UserError: not of this form.
    """
    match = re.fullmatch(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?)(:(.*))?", remote, re.DOTALL)
    if match is None or "\0" in remote:
        raise UserError(f"{remote!r} is not of the form VOLUME:/PATH, such as imagenet:/runs")
    parts = [part for part in (match[4] or "").split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UserError(f"{remote!r}: a path on a volume must not contain '..'")
    path = "/" + "/".join(parts)
    return match[1], path + "/" if parts and remote.endswith("/") else path


def listing(entries: list[list[Any]]) -> list[str]:
    """Lines with size, time and name, from [name, is a folder, bytes, seconds since 1970, link target]."""
    from rich.filesize import decimal

    rows = []
    for name, is_folder, size, when, link in entries:
        shown = printable(name) + ("/" if is_folder else f" -> {printable(link)}" if link else "")
        rows.append(("-" if is_folder else decimal(size), time.strftime("%Y-%m-%d %H:%M", time.localtime(when)), shown))
    width = max((len(size) for size, _, _ in rows), default=0)
    return [f"{size:>{width}}  {when}  {name}" for size, when, name in rows]


class ResumingStream:
    """A stream that resumes at the same byte whenever the connection breaks.

    Args:
        open_at: opens the stream at a byte offset. Its first message is the result of the scan, kept in ``totals``.
    """

    def __init__(self, open_at: Callable[[int], Messages]) -> None:
        self._open = open_at
        self._received = 0
        self.totals: dict[str, Any] = {}
        self._messages: Messages | None = self._connect()

    def receive(self) -> dict[str, Any] | bytes:
        """The next message of the stream.

        Raises:
            Unreachable: the connection broke several times without a byte in between.
        """
        pauses = iter(_RETRY_PAUSES_S)
        while True:
            try:
                self._messages = self._messages or self._connect()
                message = self._messages.receive()
            except Unreachable as error:
                pause = next(pauses, None)
                if pause is None:
                    raise
                note(f"{error}; retrying")
                self._messages = None
                time.sleep(pause)
            else:
                self._received += len(message) if isinstance(message, bytes) else 0
                return message

    def _connect(self) -> Messages:
        messages = self._open(self._received)
        self.totals = messages.receive_fields()
        while not self.totals["scanned"]:
            self.totals = messages.receive_fields()
        return messages


def pod_program() -> tuple[list[str], bytes]:
    """The arguments of the pod's Python, and the program that it reads first: the pod's side of `transfer`."""
    return ["-c", transfer.LOADER, *(str(len(source)) for source in _SOURCES)], b"".join(_SOURCES)


@contextmanager
def _connected(cluster: Cluster, volume: str, pod: PodOptions, read_only: bool) -> Iterator[Callable[..., Messages]]:
    """Run a pod that mounts the volume; yields a function that sends it a request and returns the message channel.

    Raises:
        UserError: no such volume or path, no container image, or local files that cannot be read or written.
        ClusterError: the pod does not start, the connection broke, or the pod's side failed.
    """
    # The random suffix keeps concurrent commands apart.
    suffix = secrets.token_hex(3)
    settings = file_pod.plan(cluster, volume, suffix, pod.image, read_only, pod.pull_secret, pod.fixed_user)
    with file_pod.running(cluster, settings, pod.wait, note) as pod_name, ExitStack() as sessions:

        def request(**fields: Any) -> Messages:
            command, program = pod_program()
            session = cluster.exec(pod_name, file_pod.CONTAINER, ["python3", *command])
            sessions.callback(session.close)
            messages = Messages(session.read, session.write)
            with suppress(Answered):
                session.write(program)
                messages.send(root=str(VOLUMES / volume), **fields)
            return messages

        try:
            yield request
        except transfer.Failed as error:
            text = f"volume {volume}: {printable(str(error))}"
            raise UserError(text) if error.user_error else ClusterError(text) from None
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None


@contextmanager
def _progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; yields a function that advances it by a number of bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    title_column = TextColumn("{task.description}", markup=False)
    columns = (title_column, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not live_output.possible(console)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def _summarize(summary: dict[str, Any]) -> None:
    from rich.filesize import decimal

    files = f"{summary['files']:,} {'file' if summary['files'] == 1 else 'files'}"
    note(f"{files}, {decimal(summary['bytes'])}, checksum verified")
    for name in summary["skipped"][:_MAX_NAMES]:
        note(f"skipped: {printable(name)}")
    if len(summary["skipped"]) > _MAX_NAMES:
        note(f"skipped: {len(summary['skipped']) - _MAX_NAMES} more")
