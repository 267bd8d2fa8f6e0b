"""What `worldsize labels` writes: a table on the terminal, a CSV file, and a page to correct the labels."""

from __future__ import annotations

import csv
import html
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from worldsize.data.samples import Dataset
from worldsize.data.survey.sheet import data_url, thumbnail
from worldsize.inference.labels.suspects import Suspect

COLUMNS = (
    *("split", "index", "image", "given", "label", "proposed"),
    *("probability", "margin", "loss", "visits", "copies"),
)
_SHOWN = 20


def table(path: Path, found: Sequence[Suspect]) -> None:
    """Write the file that `worldsize.data.datasets.relabel` reads."""
    with open(path, "x", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_row(one) for one in found)


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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table("image", "given", "proposed", "margin", box=None, header_style="bold", pad_edge=False)
    grid.columns[3].justify = "right"
    for one in found[:_SHOWN]:
        copies = f" (also {', '.join(one.copies)})" if one.copies else ""
        cells = (f"{one.image}{copies}", one.given, _proposal(one), _number(one.margin, 2))
        grid.add_row(*map(Text, cells))
    Console().print(grid)
    if len(found) > _SHOWN:
        print(f"... and {len(found) - _SHOWN:,} more")


def sheet(path: Path, title: str, found: Sequence[Suspect], dataset: Dataset) -> None:
    """Write the page: every image with its labels, a choice of the correct one, and the file to download."""
    name = html.escape(title)
    changed = sum(one.label != one.given for one in found)
    rows = [dict(zip(COLUMNS, _row(one), strict=True)) for one in found]
    data = json.dumps({"columns": COLUMNS, "classes": dataset.classes, "rows": rows}).replace("<", "\\u003c")
    figures = "\n".join(_figure(dataset, one, number) for number, one in enumerate(found))
    path.write_text(
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data:\">"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{name}</title><style>{_resource('sheet.css')}</style>\n<header><h1>{name}</h1>"
        f"<p>{len(found):,} images, the most suspicious first. Choose the correct label of each, then download the file: "
        f"<code>worldsize train RECIPE --data.labels labels.csv</code>.</p>"
        f'<p><button id="download">Download labels.csv</button> <span id="changed">{changed:,}</span> labels differ from '
        f"the given ones.</p></header>\n<main>\n{figures}\n</main>\n"
        f'<script type="application/json" id="data">{data}</script><script>{_resource("sheet.js")}</script></html>\n',
        "utf-8",
        errors="replace",
    )


def _figure(dataset: Dataset, one: Suspect, number: int) -> str:
    samples = dataset.val if one.split == "val" else dataset.train
    image, given = html.escape(one.image), html.escape(one.given)
    copies = f"<br>same image: {html.escape(', '.join(one.copies))}" if one.copies else ""
    return (
        f'<figure data-row="{number}"><img src="{data_url(thumbnail(samples, one.index))}" alt="{image}"><figcaption>'
        f"given <b>{given}</b><br>{_opinion(one)}{copies}"
        f'<br><label>label <select aria-label="label of {image}"></select></label><br><span class=soft>{image}</span>'
        "</figcaption></figure>"
    )


def _opinion(one: Suspect) -> str:
    if not one.visits:
        return f"not seen in training ({one.split})"
    return f"proposed <b>{html.escape(one.proposed)}</b> {one.probability:.0%}<br>margin {one.margin:.2f}"


def _resource(name: str) -> str:
    return (resources.files("worldsize.inference.labels") / name).read_text("utf-8")
