"""The command lines of ``train`` and ``eval``, typed; tyro turns them into flags and ``--help``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
from pydantic import ValidationError

from worldsize.catalog import explain
from worldsize.errors import UserError
from worldsize.recipe import Recipe

T = TypeVar("T")

# Its fields are flags of their own.
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
# Its settings are flags of their own: --data.root, not --settings.data.root.
_Settings = Annotated[Recipe, tyro.conf.arg(name="")]


@dataclass
class Train:
    """Train RECIPE (a name from `worldsize recipes`, or a YAML file), or go on with a run.

    Any setting can be changed by its dotted name. The defaults shown are those of the recipe. `--on pytorchjob`, `mpijob`
    or `trainjob` trains on a cluster: `worldsize train RECIPE --on pytorchjob --help`.
    """

    settings: _Settings
    procs: int = 1
    """Processes on this machine; each takes one GPU, or its share of the cores."""
    name: str | None = None
    """Name of the run's folder (default: RECIPE-N)."""
    out: Path = Path("runs")
    """Where run folders go."""
    resume: Path | None = None
    """Go on with this run, exactly where it stopped; at another --procs too."""
    allow_changes: bool = False
    """With --resume: go on although the recipe or the data changed."""
    autoresume: bool = False
    """If OUT/NAME exists, go on with it: what a scheduler that starts jobs again should say. Needs --name."""
    retries: int = 3
    """With --autoresume: give up after this many starts in a row that ended before the next checkpoint."""


@dataclass
class Evaluate:
    """Evaluate a run's newest checkpoint, or one checkpoint, on the validation set; every picture counts once.

    Any setting can be changed by its dotted name, to evaluate at another size or precision, or on other pictures.
    """

    settings: _Settings
    procs: int = 1
    """Processes on this machine; each takes one GPU, or its share of the cores."""


@dataclass
class BenchStrategies:
    """Compare every strategy that works here: real runs on made-up pictures, in rounds in which each takes its turn.

    Prints a table and leaves it, with all figures and the runs themselves, in OUT/bench-strategies-N.
    """

    procs: int = 2
    """Processes on this machine."""
    model: str = "resnet50"
    """Any classification model of torchvision."""
    batch: int = 8
    """Samples per process and step."""
    size: int = 224
    """Side of the pictures, pixels."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Number format."""
    steps: int = 19
    """Steps of each run; the first three are not counted."""
    rounds: int = 3
    """How often each strategy takes its turn."""
    only: tuple[str, ...] = ()
    """Compare these alone with ddp, by their names in the table (quote those of several words)."""
    out: Path = Path("runs")
    """Where the folder goes."""


@dataclass
class BenchLoader:
    """How fast a data set's training pictures are read, decoded and cut here, by this loader and by others, in rounds in
    which each takes its turn; what the limit is; how many cores a device needs.

    Prints a table and leaves it, with all figures, in OUT/bench-loader-N.
    """

    root: tuple[Path, ...]
    """The data set, in files or packed; others that are named after it, such as packed forms of it, are compared with it."""
    data: Literal["imagenet", "folder", "cifar10"] | None = None
    """How the data sets are laid out (default: found out)."""
    against: str = ""
    """Others to compare with, of torchvision, torchcodec, dali and webdataset, with commas between; each is tried with
    half, once and twice as many worker processes."""
    size: int = 224
    """Side of the crops, pixels."""
    batch: int = 64
    """Pictures in a batch."""
    workers: int | None = None
    """Decoding threads (default: one per core)."""
    readers: int = 16
    """Reads in flight."""
    prefetch: int = 4
    """Batches prepared ahead."""
    pictures: int = 2000
    """Pictures of a pass, at most."""
    rounds: int = 5
    """How often each takes its turn, after one that is not counted."""
    feed: float = 2500
    """Images/s that a device uses; the default is about ResNet-50 in mixed precision on one A100 (NVIDIA)."""
    out: Path = Path("runs")
    """Where the folder goes."""


def parse(kind: type[T], argv: list[str], default: T | None, title: str) -> T:
    """The command line as a ``kind``; without a ``default`` its fields' own.

    Raises:
        UserError: values that do not fit together.
        SystemExit: 0 after ``--help``, 64 where tyro has printed what is wrong.
    """
    try:
        values = tyro.MISSING_NONPROP if default is None else default
        return tyro.cli(kind, prog=f"worldsize {title}", args=argv, default=values)
    except ValidationError as error:
        raise UserError(f"these settings do not fit:\n{explain(error)}") from None
    except SystemExit as stop:
        raise SystemExit(UserError.exit_code if stop.code else 0) from None


def value_of(flag: str, argv: list[str]) -> str | None:
    """The value of ``flag`` before the rest can be parsed (its meaning depends on it)."""
    for i, argument in enumerate(argv):
        if argument.startswith(flag + "="):
            return argument.split("=", 1)[1]
        if argument == flag:
            if i + 1 == len(argv):
                raise UserError(f"{flag} needs a value")
            return argv[i + 1]
    return None


def without(flag: str, argv: list[str]) -> list[str]:
    """The command line without ``flag`` and its value."""
    kept = [argument for argument in argv if not argument.startswith(flag + "=")]
    if flag in kept:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept
