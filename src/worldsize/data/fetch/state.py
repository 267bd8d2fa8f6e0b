"""State of a fetch, kept in its own subfolder of the dataset folder so that an interrupted fetch can resume."""

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

from worldsize.data.fetch import Interrupted
from worldsize.data.fetch.known import Counts
from worldsize.errors import UserError
from worldsize.runs.atomic import write_json

FOLDER = ".worldsize-fetch"


@dataclass(frozen=True)
class Verified:
    """What was found in the complete dataset."""

    counts: Counts
    files: int
    bytes: int


@dataclass
class FetchState:
    """Progress of the fetch into ``root``.

    ``source`` is the source without secrets. ``size`` and ``validator`` (an ETag or a date) describe the archive at the
    source; ``checked`` is the checksum verified so far. The first ``unpacked`` files of the archive, in its own order,
    are in place.
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
        """The state folder inside ``root``."""
        return self.root / FOLDER

    @property
    def part(self) -> Path:
        """The partially downloaded archive."""
        return self.folder / "archive.part"

    @property
    def archive(self) -> Path:
        """The complete archive."""
        return self.folder / "archive"

    def save(self) -> None:
        """Write the state to disk atomically."""
        fields = dataclasses.asdict(self)
        del fields["root"]
        write_json(self.folder / "state.json", fields)


def load_or_create(root: Path, dataset: str, source: str) -> FetchState:
    """The state of ``root``, which must be empty or belong to the same dataset and source.

    Raises:
        UserError: it is neither.
    """
    fields = _read(root / FOLDER / "state.json")
    if fields is None:
        other_files = sorted(entry.name for entry in os.scandir(root) if entry.name != FOLDER)
        if other_files:
            raise UserError(f"{root} is not empty (it contains {other_files[0]}); pass a new folder with --to")
        return FetchState(root, dataset, source)
    verified = fields.pop("verified")
    state = FetchState(root, **fields)
    if (state.dataset, state.source) != (dataset, source):
        raise UserError(
            f"{root} contains {state.dataset} from {state.source}, complete or partial; "
            f"pass another folder with --to, or delete this one to fetch {dataset} from {source} into it"
        )
    if verified is not None:
        state.verified = Verified(Counts(**verified["counts"]), verified["files"], verified["bytes"])
    return state


@contextmanager
def locked(root: Path) -> Iterator[int]:
    """Lock ``root`` against a second fetch. Yields the descriptor of the lock: a process that inherits it keeps the lock.

    Raises:
        Interrupted: another fetch holds the lock.
    """
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    with open(root / FOLDER / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Interrupted(f"another fetch is running in {root}; wait until it has finished") from None
        except OSError:
            pass  # the file system does not support locks
        yield file.fileno()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (FileNotFoundError, ValueError):  # truncated by a crash of the machine
        return None
