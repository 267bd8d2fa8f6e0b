"""What `worldsize labels` writes: a table on the terminal, a CSV file, and a page to correct the labels."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from worldsize import pages
from worldsize.config import output_files
from worldsize.config.wording import count, printable
from worldsize.data.samples import Dataset
from worldsize.data.survey.sheet import data_uri, thumbnail
from worldsize.inference.labels.suspects import Suspect

COLUMNS = (
    *("split", "index", "image", "given", "label", "proposed"),
    *("probability", "margin", "loss", "visits", "copies"),
)
_SHOWN = 20


def table(path: Path, found: Sequence[Suspect]) -> None:
    """Write the file that `worldsize.data.datasets.relabel` reads.

    Raises:
        UserError, StoreUnreachable: it cannot be written, and is not there.
    """
    with output_files.written(path), open(path, "x", newline="", encoding="utf-8", errors="surrogateescape") as file:
        try:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(_row(one) for one in found)
            file.flush()
        except BaseException:
            # The next call refuses a file that exists, as one with corrections.
            path.unlink(missing_ok=True)
            raise


def _row(one: Suspect) -> tuple[str, ...]:
    values = (_number(one.probability, 4), _number(one.margin, 3), _number(one.loss, 3), str(one.visits))
    return (one.split, str(one.index), one.image, one.given, one.label, one.proposed, *values, "; ".join(one.copies))


def _number(value: float, digits: int) -> str:
    """Nothing for NaN."""
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _proposal(one: Suspect) -> str:
    return f"{one.proposed} {one.probability:.0%}" if one.proposed else ""


def show(found: Sequence[Suspect]) -> None:
    """Print the most suspicious images."""
    from rich.text import Text

    from worldsize.config import tables

    grid = tables.table("image", "given", "proposed", "margin")
    grid.columns[3].justify = "right"
    for one in found[:_SHOWN]:
        copies = f" (also {', '.join(one.copies)})" if one.copies else ""
        cells = (f"{one.image}{copies}", one.given, _proposal(one), _number(one.margin, 2))
        grid.add_row(*(Text(printable(cell)) for cell in cells))
    tables.console().print(grid)
    if len(found) > _SHOWN:
        print(f"... and {len(found) - _SHOWN:,} more")


def sheet(path: Path, title: str, found: Sequence[Suspect], dataset: Dataset) -> None:
    """Write the page: every image with its labels, a choice of the correct one, and the file to download.

    Raises:
        UserError, StoreUnreachable: it cannot be written.
    """
    text = pages.render(
        "labels.html",
        title=title,
        count=count(len(found)),
        changed=sum(one.label != one.given for one in found),
        images=[_image(dataset, one) for one in found],
        data={
            "columns": COLUMNS,
            "classes": dataset.classes,
            "rows": [dict(zip(COLUMNS, _row(one), strict=True)) for one in found],
        },
    )
    with output_files.written(path):
        path.write_text(text, "utf-8")


def _image(dataset: Dataset, one: Suspect) -> dict[str, object]:
    """An image as the page shows it."""
    samples = dataset.val if one.split == "val" else dataset.train
    return {
        "source": data_uri(thumbnail(samples, one.index)),
        "name": one.image,
        "given": one.given,
        "unseen": "" if one.visits else f"not seen in training ({one.split})",
        "proposed": one.proposed,
        "probability": f"{one.probability:.0%}",
        "margin": f"{one.margin:.2f}",
        "copies": one.copies,
    }
