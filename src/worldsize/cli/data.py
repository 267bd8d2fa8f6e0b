"""The commands of ``worldsize data``: one function per command, without logic of its own. Does not import torch."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from worldsize.config import command_line, output_files
from worldsize.config.wording import printable
from worldsize.distributed.rank import cores
from worldsize.distributed.stop_signals import ends_at_once, temporary_folder
from worldsize.errors import UserError

_OneLabel = Literal["imagenet", "folder", "cifar10"]  # per image
_Kind = Literal["imagenet", "folder", "cifar10", "multilabel"]


@dataclass
class Pack:
    """Pack a dataset into shards (tar files) of about 100 MB, for `--data.root`, WebDataset and `tar`.

    If it is interrupted, rerun the same command to continue. Without --reencode and --raw, the bytes of the images do
    not change, and training on the shards gives bit-identical results.
    """

    root: tyro.conf.Positional[Path]
    """The dataset."""
    out: Path
    """A new folder for the shards."""
    data: _OneLabel | None = None
    """Layout of the dataset; images with several labels cannot be packed (default: detected)."""
    reencode: int | None = None
    """Store every image as a baseline JPEG of this quality, 1 to 100 (4:2:0). JPEGs that would not get smaller stay."""
    max_side: int | None = None
    """With --reencode: shrink the longer side to at most this many pixels."""
    relabel: Path | None = None
    """Corrected labels of some images, a CSV file of `worldsize labels`."""
    raw: int | None = None
    """Store pixels: resize the shorter side to this many pixels, then crop the center square."""
    shard_mb: float = 100
    """Maximum size of a shard, MB. Shards get smaller if --reencode saves more than expected."""
    workers: int | None = None
    """Threads (default: one per core)."""
    max_broken: float = 0.001
    """Fail if more than this share of a split's images is broken. Otherwise, broken images are packed unchanged."""


@dataclass
class Verify:
    """Decode every image once, list broken, odd and duplicate images, and count images per class.

    Works on original files and on shards. Of shards, every byte is checked. Exits with 65 if too many images are broken,
    with 69 if images cannot be read.
    """

    root: tyro.conf.Positional[Path]
    """The dataset, packed or not."""
    data: _Kind | None = None
    """Layout of the dataset (default: detected)."""
    report: Path | None = None
    """Write all results to this JSON file."""
    workers: int | None = None
    """Threads (default: one per core)."""
    max_broken: float = 0.001
    """Exit with 65 if more than this share of a split's images is broken."""


@dataclass
class Info:
    """Describe a dataset: classes, image sizes, formats and packing options. With --sheet, also show some of its images."""

    root: tyro.conf.Positional[Path]
    """The dataset, packed or not."""
    data: _Kind | None = None
    """Layout of the dataset (default: detected)."""
    sheet: Path | None = None
    """Write a contact sheet of training images to this file, .png or .html (self-contained)."""
    images: int = 64
    """Number of images on the sheet, balanced over the classes."""
    seed: int = 0
    """Seed for the choice of images."""


def fetch(argv: list[str]) -> int:
    """``worldsize data fetch``."""
    from worldsize.data.fetch import command

    return command.run(command_line.parse(command.Fetch, argv, None, "data fetch"))


def pack(argv: list[str]) -> int:
    """``worldsize data pack``."""
    options = command_line.parse(Pack, _with_root_first(argv), None, "data pack")
    from worldsize.data import open_layout
    from worldsize.data.datasets import relabel
    from worldsize.data.shards import pack
    from worldsize.data.shards.images import How

    how = How(options.reencode, options.max_side, options.raw)
    if not 1e-3 <= options.shard_mb <= 4000:
        raise UserError(f"--shard-mb {options.shard_mb:g}: must be 0.001 to 4,000; 64 to 128 are typical")
    _check_share(options.max_broken)
    out = options.out.expanduser()
    with ends_at_once("rerun the same command to continue", continues=True), temporary_folder() as cache, _disk_errors(out):
        dataset = open_layout(options.root, options.data, cache)
        if dataset.multilabel:
            raise UserError(f"{options.root}: shards have one label per image; train on these files as they are")
        for note in dataset.notes:
            print(printable(f"warning: {note}"))
        if options.relabel is not None:
            dataset = relabel.apply(dataset, options.relabel)
        pack.pack(dataset, out, how, int(options.shard_mb * 1e6), _workers(options.workers), options.max_broken)
    return 0


def verify(argv: list[str]) -> int:
    """``worldsize data verify``."""
    options = command_line.parse(Verify, _with_root_first(argv), None, "data verify")
    from worldsize.data import open_layout
    from worldsize.data.broken_images import require_few
    from worldsize.data.survey import verify, verify_report

    workers = _workers(options.workers)
    _check_share(options.max_broken)
    if options.report is not None:
        output_files.check("--report", options.report)
    with ends_at_once("nothing was changed"), temporary_folder() as cache:
        dataset = open_layout(options.root, options.data, cache)
        found = verify.verify(dataset, workers)
    for line in verify_report.summary(dataset, found):
        print(line)
    if options.report is not None:
        with output_files.written(options.report):
            options.report.write_text(json.dumps(verify_report.report(dataset, found), indent=1), "utf-8")
        print(f"full report: {options.report}")
    verify.require_read(found)
    broken = {name: (len(one.broken), len(one.samples)) for name, one in found.items()}
    require_few(broken, options.max_broken, "remove or replace them, or pass a larger --max-broken")
    return 0


def info(argv: list[str]) -> int:
    """``worldsize data info``."""
    options = command_line.parse(Info, _with_root_first(argv), None, "data info")
    from worldsize.data import open_layout
    from worldsize.data.survey import info, sheet

    if options.sheet is not None and options.sheet.suffix.lower() not in (".png", ".html"):
        raise UserError(f"--sheet {options.sheet}: must end in .png or .html")
    if options.images < 1:
        raise UserError(f"--images {options.images}: must be at least 1")
    if options.sheet is not None:
        output_files.check("--sheet", options.sheet)
    with temporary_folder() as cache:
        dataset = open_layout(options.root, options.data, cache)
    for line in info.describe(dataset, options.root, options.seed):
        print(line)
    if options.sheet is not None:
        with output_files.written(options.sheet):
            count = sheet.write(dataset.train, options.sheet, str(options.root), options.images, options.seed)
        print(f"contact sheet with {count} training images: {options.sheet}")
    return 0


def _with_root_first(argv: list[str]) -> list[str]:
    """The command line with the dataset as its first word: ``--root DATASET`` names it, too."""
    command_line.refuse_empty_arguments(argv)
    root = command_line.value_of("--root", argv)
    return argv if root is None else [root, *command_line.without("--root", argv)]


def _workers(number: int | None) -> int:
    if number is not None and number < 1:
        raise UserError(f"--workers {number}: must be at least 1")
    return number or cores()


def _check_share(max_broken: float) -> None:
    if not 0 <= max_broken <= 1:
        raise UserError(f"--max-broken {max_broken:g}: must be a share of the images, 0 to 1")


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"the disk of {out} is full: free space, then rerun the same command to continue") from None
        raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
