"""What an interrupted fetch leaves behind for the next one, in a folder of its own inside the data set's."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldsize.data.fetching import Interrupted
from worldsize.data.fetching.known import Counts
from worldsize.errors import UserError

FOLDER = ".worldsize-fetch"


@dataclass(frozen=True)
class Verified:
    """What was found when everything was there."""

    counts: Counts
    files: int
    bytes: int


@dataclass
class State:
    """How far the data set in ``root`` has come.

    ``source`` names where it comes from, without anything secret. ``size`` and ``validator`` (an ETag, a date) are of
    the archive at the source; ``checked`` is the checksum that it was found to have. So many files of it, in its own
    order, are ``unpacked`` and in place.
    """

    root: Path
    dataset: str
    source: str
    size: int | None = None
    validator: str = ""
    checked: str = ""
    unpacked: int = 0
    verified: Verified | None = None

    @property
    def folder(self) -> Path:
        """Ours, inside ``root``."""
        return self.root / FOLDER

    @property
    def part(self) -> Path:
        """The archive while it is being downloaded."""
        return self.folder / "archive.part"

    @property
    def archive(self) -> Path:
        """The whole archive."""
        return self.folder / "archive"

    def save(self) -> None:
        """Replace what the disk knows."""
        fields = dataclasses.asdict(self)
        del fields["root"]
        temporary = self.folder / "state.tmp"
        temporary.write_text(json.dumps(fields, indent=1), "utf-8")
        os.replace(temporary, self.folder / "state.json")


def begin(root: Path, dataset: str, source: str) -> State:
    """The state of ``root``, which is empty or was begun for the same data set from the same source.

    Raises:
        UserError: it is neither.
    """
    fields = _read(root / FOLDER / "state.json")
    if fields is None:
        strangers = sorted(entry.name for entry in os.scandir(root) if entry.name != FOLDER)
        if strangers:
            raise UserError(f"{root} is not empty ({strangers[0]} is in it): name a new folder with --to")
        return State(root, dataset, source)
    verified = fields.pop("verified")
    state = State(root, **fields)
    if (state.dataset, state.source) != (dataset, source):
        raise UserError(
            f"{root} holds {state.dataset} from {state.source}, whole or in part: "
            f"name another folder with --to, or remove this one to fetch {dataset} from {source} into it"
        )
    if verified is not None:
        state.verified = Verified(Counts(**verified["counts"]), verified["files"], verified["bytes"])
    return state


@contextmanager
def locked(root: Path) -> Iterator[int]:
    """Keep a second fetch out of ``root``. Gives the lock's descriptor: who inherits it keeps the lock.

    Raises:
        Interrupted: another fetch is in it.
    """
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    with open(root / FOLDER / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Interrupted(f"another fetch is at work in {root}: wait until it has ended") from None
        except OSError:
            pass  # a file system without locks
        yield file.fileno()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (FileNotFoundError, ValueError):  # not written whole: the machine has gone down meanwhile
        return None
