"""Files on a volume: listing, fetching and bringing them."""

from __future__ import annotations

import os
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

from worldsize.errors import UserError
from worldsize.launch import filepod, transfer
from worldsize.launch.answers import ClusterError, Unreachable
from worldsize.launch.cluster import Cluster
from worldsize.launch.options import Where
from worldsize.launch.show import note
from worldsize.launch.spec import VOLUMES
from worldsize.launch.transfer import Answered, Messages

_There = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="VOLUME:/PATH")]
_NAMED = 5  # names in one message, at most
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before asking again
_PROGRAM = package_files("worldsize.launch").joinpath("transfer.py").read_bytes()


@dataclass(frozen=True)
class Reach:
    """How a volume is reached: by a pod that mounts it and is deleted afterwards."""

    image: str = ""
    """Image of the pod: any with Python 3 (default: that of the newest pod of worldsize in the namespace)."""
    pull_secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Secret that the image is pulled with."""
    wait: float = 300.0
    """Seconds that the pod may take to start."""


_Flat = tyro.conf.arg(name="")


@dataclass(frozen=True)
class FilesList:
    """List a folder of a volume, or one file."""

    there: _There
    """The volume and the path on it; VOLUME alone is its root."""
    reach: Annotated[Reach, _Flat] = field(default_factory=Reach)
    where: Annotated[Where, _Flat] = field(default_factory=Where)


@dataclass(frozen=True)
class FilesGet:
    """Fetch a file, or a folder with all that is in it. It appears when it is whole and its checksum right."""

    there: _There
    """The volume and the path on it."""
    local: Annotated[Path, tyro.conf.Positional] = Path()
    """Where to; in a folder that exists it keeps its name."""
    force: bool = False
    """Replace local files of the same names."""
    reach: Annotated[Reach, _Flat] = field(default_factory=Reach)
    where: Annotated[Where, _Flat] = field(default_factory=Where)


@dataclass(frozen=True)
class FilesPut:
    """Bring a file, or a folder with all that is in it, to a volume. It appears when it is whole and its checksum right."""

    local: Annotated[Path, tyro.conf.Positional]
    """What to bring."""
    there: _There
    """The volume and the path on it; in a folder that exists it keeps its name, folders that are missing are made."""
    force: bool = False
    """Replace files of the same names on the volume."""
    reach: Annotated[Reach, _Flat] = field(default_factory=Reach)
    where: Annotated[Where, _Flat] = field(default_factory=Where)


def show(asked: FilesList, cluster: Cluster) -> int:
    """``worldsize cluster files ls``; for errors see `_reached`."""
    volume, path = parse(asked.there)
    with _reached(cluster, volume, asked.reach, read_only=True) as talk:
        entries = talk(do="ls", path=path).facts()["entries"]
    for line in listing(entries):
        print(line)
    return 0


def get(asked: FilesGet, cluster: Cluster) -> int:
    """``worldsize cluster files get``; for errors see `_reached`.

    Raises:
        UserError: it is here already and --force is missing, or it does not fit.
    """
    volume, path = parse(asked.there)
    target = asked.local / (posixpath.basename(path.rstrip("/")) or volume) if asked.local.is_dir() else asked.local
    if not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent}")
    if os.path.lexists(target) and not asked.force:
        raise UserError(f"{target} exists already; --force replaces it")
    with _reached(cluster, volume, asked.reach, read_only=True) as talk:
        stream = Persistent(lambda got: talk(do="get", path=path, skip=got))
        if shutil.disk_usage(target.parent).free < stream.found["bytes"]:
            raise UserError(f"{target} would have {stream.found['bytes']:,} bytes: there is not so much room")
        with _bar(str(target), stream.found["stream"]) as moved:
            sent = transfer.unpack(stream.hear, target, asked.force, moved)
    _summarise(sent)
    print(_printable(str(target)))
    return 0


def put(asked: FilesPut, cluster: Cluster) -> int:
    """``worldsize cluster files put``; for errors see `_reached`.

    Raises:
        UserError: it is there already and --force is missing, or it does not fit.
    """
    volume, path = parse(asked.there)
    local = asked.local.resolve()
    name = asked.local.name if asked.local.is_symlink() else local.name
    if not local.exists():
        raise UserError(f"there is no {asked.local}")
    with _reached(cluster, volume, asked.reach, read_only=False) as talk:
        found = transfer.survey(local)
        messages = talk(do="put", path=path, name=name, replace=asked.force, bytes=found["bytes"])
        messages.facts()
        # Where it wants no more before the end, its answer says why.
        with suppress(Answered), _bar(str(asked.local), found["stream"]) as moved:
            sent = transfer.pack(local, messages, moved)
            messages.tell(**sent)
        there = messages.facts()
    _summarise(sent)
    print(_printable(f"{volume}:{there['path']}"))
    return 0


def parse(there: str) -> tuple[str, str]:
    """VOLUME:/PATH in two; the path begins with "/" and ends with one if it must be a folder.

    Raises:
        UserError: it is something else.
    """
    match = re.fullmatch(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?)(:(.*))?", there, re.DOTALL)
    if match is None or "\0" in there:
        raise UserError(f"{there!r}: write it as VOLUME:/PATH, such as imagenet:/runs")
    steps = [step for step in (match[4] or "").split("/") if step not in ("", ".")]
    if ".." in steps:
        raise UserError(f"{there!r}: a path on a volume goes down from its root, without '..'")
    path = "/" + "/".join(steps)
    return match[1], path + "/" if steps and there.endswith("/") else path


def listing(entries: list[list[Any]]) -> list[str]:
    """Size, time and name of [name, is a folder, bytes, seconds since 1970, link], as lines."""
    from rich.filesize import decimal

    rows = []
    for name, folder, size, when, link in entries:
        shown = _printable(name) + ("/" if folder else f" -> {_printable(link)}" if link else "")
        rows.append(("-" if folder else decimal(size), time.strftime("%Y-%m-%d %H:%M", time.localtime(when)), shown))
    width = max((len(size) for size, _, _ in rows), default=0)
    return [f"{size:>{width}}  {when}  {name}" for size, when, name in rows]


class Persistent:
    """A stream from a sender that is asked again for the rest whenever the connection breaks off.

    Args:
        ask: has it sent but for its first so many bytes; what comes first is facts, which are then in ``found``.
    """

    def __init__(self, ask: Callable[[int], Messages]) -> None:
        self._ask = ask
        self._got = 0
        self.found: dict[str, Any] = {}
        self._messages: Messages | None = self._begin()

    def hear(self) -> dict[str, Any] | bytes:
        """The next message of the stream.

        Raises:
            Unreachable: the connection broke off several times without a byte in between.
        """
        pauses = iter(_PAUSES_S)
        while True:
            try:
                self._messages = self._messages or self._begin()
                heard = self._messages.hear()
            except Unreachable as error:
                pause = next(pauses, None)
                if pause is None:
                    raise
                note(f"{error}; trying again")
                self._messages = None
                time.sleep(pause)
            else:
                self._got += len(heard) if isinstance(heard, bytes) else 0
                return heard

    def _begin(self) -> Messages:
        messages = self._ask(self._got)
        self.found = messages.facts()
        while not self.found["surveyed"]:
            self.found = messages.facts()
        return messages


@contextmanager
def _reached(cluster: Cluster, volume: str, reach: Reach, read_only: bool) -> Iterator[Callable[..., Messages]]:
    """Have a pod at the volume; gives what sends it a request, and the messages that follow.

    Raises:
        UserError: no such volume, no such path, no image to take, or local files that cannot be read or written.
        ClusterError: the pod does not start, the connection broke off, or the pod's side failed.
    """
    # Another person's pod, or another command's, has another name.
    of = filepod.fitting(cluster, volume, secrets.token_hex(3), reach.image, read_only, reach.pull_secret)
    with filepod.running(cluster, of, reach.wait, note) as pod, ExitStack() as sessions:

        def talk(**request: Any) -> Messages:
            session = cluster.exec(pod, filepod.CONTAINER, ["python3", "-c", transfer.LOADER, str(len(_PROGRAM))])
            sessions.callback(session.close)
            messages = Messages(session.read, session.write)
            with suppress(Answered):
                session.write(_PROGRAM)
                messages.tell(root=str(VOLUMES / volume), **request)
            return messages

        try:
            yield talk
        except transfer.Failed as error:
            told = f"volume {volume}: {_printable(str(error))}"
            raise UserError(told) if error.mendable else ClusterError(told) from None
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; gives what tells it how many bytes have moved."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    figures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    what = TextColumn("{task.description}", markup=False)
    with Progress(what, BarColumn(), *figures, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def _summarise(sent: dict[str, Any]) -> None:
    from rich.filesize import decimal

    note(f"{sent['files']:,} {'file' if sent['files'] == 1 else 'files'}, {decimal(sent['bytes'])}, checksum right")
    for name in sent["left_out"][:_NAMED]:
        note(f"left out: {_printable(name)}")
    if len(sent["left_out"]) > _NAMED:
        note(f"left out: {len(sent['left_out']) - _NAMED} more")


def _printable(name: str) -> str:
    """The name as a terminal may see it."""
    return name if name.isprintable() else name.encode("unicode_escape", "surrogateescape").decode("ascii", "replace")
