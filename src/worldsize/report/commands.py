"""``worldsize report``, ``runs`` and ``compare``: one function per command, without logic of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from worldsize.config import command_line, output_files
from worldsize.distributed.stop_signals import ends_at_once
from worldsize.errors import FAILED, SUCCESS, UserError
from worldsize.report import differences, overview, reading


@dataclass
class Report:
    """Write one page about runs of one dataset, or about benchmarks and plans. It needs no network and works on phones.

    Runs that differ only in their seed become one band. The folders are not changed.
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|BENCH|PLAN")]
    """Folders of runs, or of one kind of `worldsize bench`, such as one for each kind of job, and files of `worldsize plan
    --json`."""
    out: Path = Path("report.html")
    """The page."""
    price_per_hour: float | None = None
    """Of one process, for the cost to each accuracy, in any currency."""
    svg: Path | None = None
    """Also write each chart as an SVG file to this folder."""


@dataclass
class Runs:
    """List the runs in a folder, the newest first: state, epoch, best top-1, images/s, time since the last metric.

    Where images have several labels, the best mAP takes the place of top-1. A run without a result that wrote metrics in the
    last two minutes is listed as running.
    """

    folder: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """The folder that has the runs (`train --out`)."""


@dataclass
class Compare:
    """Show where two runs differ: recipe, data and environment, results.

    Exits with 0 if their results are equal, down to the fingerprints of all steps, else with 1.
    """

    a: Annotated[Path, tyro.conf.Positional]
    """A run."""
    b: Annotated[Path, tyro.conf.Positional]
    """Another run."""


def report(argv: list[str]) -> int:
    """``worldsize report``."""
    asked = command_line.parse(Report, argv, None, "report")
    command_line.check_price(asked.price_per_hour)
    try:
        from worldsize.report import charts, content, page
    except ModuleNotFoundError as error:
        if error.name != "altair":
            raise
        raise UserError("reports need Altair: pip install 'worldsize[report]'") from None
    if not asked.folders:
        raise UserError("RUN is required: worldsize report RUN, a folder such as runs/digits-1")
    output_files.check("--out", asked.out)
    if asked.svg is not None:
        output_files.check_folder("--svg", asked.svg)
    folders = _distinct(asked.folders)
    benches = [path for path in folders if reading.is_bench(path)]
    plans = [path for path in folders if path.is_file()]
    others = [path for path in folders if path not in benches and path not in plans]
    if others and (benches or plans):
        raise UserError(f"{others[0]} is not a benchmark or a plan, and {(benches + plans)[0]} is: write a report of each")
    if others:
        built = content.of_runs([reading.read(path) for path in others], asked.price_per_hour)
    else:
        built = content.of_benches([*map(reading.read_bench, benches)], [*map(reading.read_plan, plans)])
    with ends_at_once("nothing was changed"):
        text = page.write(built)
        # A full disk's error does not name the file.
        with output_files.written(asked.out):
            asked.out.write_text(text, "utf-8")
        for figure in built.figures if asked.svg is not None else ():
            assert asked.svg is not None
            path = asked.svg / f"{figure.name}.svg"
            drawing = charts.svg(figure, built.data)
            with output_files.written(path):
                asked.svg.mkdir(parents=True, exist_ok=True)
                path.write_text(drawing, "utf-8")
    print(f"{built.verdict}\n{asked.out}  {len(text.encode()) / 1e6:.1f} MB; open it in a browser")
    return SUCCESS


def _distinct(folders: Sequence[Path]) -> list[Path]:
    """Each folder once: runs/* may also name a link to one of them, such as runs/best."""
    found: dict[Path, Path] = {}
    for path in folders:
        found.setdefault(path.resolve(), path)
    return [*found.values()]


def runs(argv: list[str]) -> int:
    """``worldsize runs``."""
    asked = command_line.parse(Runs, argv, None, "runs")
    _print(overview.table(asked.folder, time.time()))
    return SUCCESS


def compare(argv: list[str]) -> int:
    """``worldsize compare``."""
    asked = command_line.parse(Compare, argv, None, "compare")
    both = [reading.read(asked.a), reading.read(asked.b)]
    results = differences.results(both)
    rows = [*differences.recipes(both), *differences.environments(both), *results, *differences.speeds(both)]
    _print([("", str(asked.a), str(asked.b)), *rows])
    print("The results differ." if results else "The results are equal.")
    return FAILED if results else SUCCESS


def _print(rows: list[tuple[str, ...]]) -> None:
    from rich.text import Text

    from worldsize.config import tables

    table = tables.table(*rows[0])
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    tables.console().print(table)
