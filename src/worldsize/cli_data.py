"""The front door for data sets: one function per verb of ``worldsize data``, no logic of its own. Imports no torch."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from worldsize import arguments
from worldsize.errors import DataError, UserError
from worldsize.place import cores
from worldsize.signals import ends_at_once

_Kind = Literal["imagenet", "folder", "cifar10"]


@dataclass
class Pack:
    """Put a data set into shards of some 100 MB, which `--data.root` may name and `tar` and WebDataset read.

    Whatever interrupts this, the same command goes on where it was. Without --reencode and --raw the pictures stay as
    they are, and training on them gives the same numbers.
    """

    root: Path
    """The data set."""
    out: Path
    """The folder that is filled: a new one."""
    data: _Kind | None = None
    """How the data set is laid out (default: found out)."""
    reencode: int | None = None
    """Store every picture as a baseline JPEG of this quality, 1 to 100 (4:2:0); those that are shorter already stay."""
    max_side: int | None = None
    """With --reencode: make the longer side at most this, pixels."""
    raw: int | None = None
    """Store pixels: the shorter side resized to this, then the square in the middle."""
    shard_mb: float = 100
    """Size of a shard, MB; smaller where --reencode saves more than expected."""
    workers: int | None = None
    """Threads (default: one per core)."""
    max_broken: float = 0.001
    """Refuse when more than this share of the pictures cannot be decoded; fewer are kept as they are."""


@dataclass
class Verify:
    """Decode every picture once: broken, odd and duplicate ones are listed, classes counted.

    Works on originals and on shards, of which every byte is checked. Ends with 65 where too many are broken.
    """

    root: Path
    """The data set, packed or not."""
    data: _Kind | None = None
    """How the data set is laid out (default: found out)."""
    report: Path | None = None
    """Write all that is found into this file, as JSON."""
    workers: int | None = None
    """Threads (default: one per core)."""
    max_broken: float = 0.001
    """How large a share of broken pictures is all right."""


@dataclass
class Info:
    """What a data set is: classes, sizes, kinds, how it was packed; and, if asked for, some of its pictures on one page."""

    root: tyro.conf.Positional[Path]
    """The data set, packed or not."""
    data: _Kind | None = None
    """How the data set is laid out (default: found out)."""
    sheet: Path | None = None
    """Write a contact sheet of training pictures into this file, .png or .html (which needs no other file)."""
    pictures: int = 64
    """How many are on it, as equally many of each class as there are."""
    seed: int = 0
    """Another seed chooses others."""


def fetch(argv: list[str]) -> int:
    """``worldsize data fetch``."""
    from worldsize.data import fetch

    return fetch.run(arguments.parse(fetch.Fetch, argv, None, "data fetch"))


def pack(argv: list[str]) -> int:
    """``worldsize data pack``."""
    asked = arguments.parse(Pack, argv, None, "data pack")
    from worldsize.data import open_layout
    from worldsize.data.shards import pack
    from worldsize.data.shards.pictures import How

    how = How(asked.reencode, asked.max_side, asked.raw)
    if not 1e-3 <= asked.shard_mb <= 4000:
        raise UserError(f"--shard-mb {asked.shard_mb:g}: 0.001 to 4,000; 64 to 128 are usual")
    out = asked.out.expanduser()
    with ends_at_once("the same command goes on from here"), tempfile.TemporaryDirectory() as cache, _room(out):
        dataset = open_layout(asked.root, asked.data, Path(cache))
        pack.pack(dataset, out, how, int(asked.shard_mb * 1e6), _workers(asked.workers), asked.max_broken)
    return 0


def verify(argv: list[str]) -> int:
    """``worldsize data verify``."""
    asked = arguments.parse(Verify, argv, None, "data verify")
    from worldsize.data import open_layout
    from worldsize.data.survey import verify, words

    workers = _workers(asked.workers)
    if asked.report is not None and not asked.report.absolute().parent.is_dir():
        raise UserError(f"--report {asked.report}: there is no folder {asked.report.absolute().parent}")
    with ends_at_once("nothing was changed"), tempfile.TemporaryDirectory() as cache:
        dataset = open_layout(asked.root, asked.data, Path(cache))
        found = verify.verify(dataset, workers)
    for line in words.tell(dataset, found):
        print(line)
    if asked.report is not None:
        asked.report.write_text(json.dumps(words.report(dataset, found), indent=1), "utf-8")
        print(f"all of it: {asked.report}")
    broken, total = sum(len(one.broken) for one in found.values()), sum(len(one.samples) for one in found.values())
    if broken > asked.max_broken * total:
        raise DataError(
            f"{broken:,} of {total:,} pictures are broken, which is more than --max-broken {asked.max_broken:g} allows: "
            "remove them, or get them again"
        )
    return 0


def info(argv: list[str]) -> int:
    """``worldsize data info``."""
    asked = arguments.parse(Info, argv, None, "data info")
    from worldsize.data import open_layout
    from worldsize.data.survey import info, sheet

    if asked.sheet is not None and asked.sheet.suffix.lower() not in (".png", ".html"):
        raise UserError(f"--sheet {asked.sheet}: a name that ends in .png or .html")
    if asked.pictures < 1:
        raise UserError(f"--pictures {asked.pictures}: at least 1")
    with tempfile.TemporaryDirectory() as cache:
        dataset = open_layout(asked.root, asked.data, Path(cache))
    for line in info.tell(dataset, asked.root, asked.seed):
        print(line)
    if asked.sheet is not None:
        with _room(asked.sheet):
            count = sheet.write(dataset.train, asked.sheet, str(asked.root), asked.pictures, asked.seed)
        print(f"{count} pictures of train: {asked.sheet}")
    return 0


VERBS: dict[str, Callable[[list[str]], int]] = {"fetch": fetch, "verify": verify, "pack": pack, "info": info}


def _workers(asked: int | None) -> int:
    if asked is not None and asked < 1:
        raise UserError(f"--workers {asked}: at least 1")
    return asked or cores()


@contextmanager
def _room(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk of {out} is full: free some, and run the same command again; it goes on") from None
        raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
