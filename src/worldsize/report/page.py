"""One HTML file with charts and tables that needs no network, and no JavaScript for its tables."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources

from worldsize.report import charts
from worldsize.report.charts import Figure
from worldsize.report.data import Data

Rows = Sequence[tuple[str, ...]]
# The browser refuses every request. Vega compiles its expressions, hence 'unsafe-eval'.
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Table:
    """A table with its heading; the first row has the titles, the first column names the row."""

    title: str
    rows: Rows


@dataclass(frozen=True)
class Picture:
    """One or two images side by side, as sources of <img>, with what is said of them and their ``name``."""

    sources: Sequence[str]
    text: str
    name: str


@dataclass(frozen=True)
class Gallery:
    """Images with a heading and a caption."""

    title: str
    caption: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Page:
    """The content of a page. ``notes`` warn about what is missing; ``facts`` are tables that start closed."""

    title: str
    verdict: str
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    galleries: list[Gallery] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    facts: list[Table] = field(default_factory=list)
    data: list[Data] = field(default_factory=list)


def write(page: Page) -> str:
    """The page as HTML.

    Raises:
        UserError: vl-convert is missing.
    """
    specifications = {figure.name: figure.specification() for figure in page.figures}
    moving = any("params" in specification for specification in specifications.values())
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>{html.escape(page.title)}</title><style>{_resource('page.css')}</style></head><body><main>",
        f"<h1>{html.escape(page.title)}</h1><p class=verdict>{html.escape(page.verdict)}</p>",
        *(f"<p class=note>{html.escape(note)}</p>" for note in page.notes),
        _SWITCH if moving else "",
        "<noscript><p class=note>The charts need JavaScript; all tables and data are below.</p></noscript>",
        f"<div class=figures>{''.join(map(_figure, page.figures))}</div>",
        *(f"<h2>{html.escape(table.title)}</h2>{_table(table)}" for table in page.tables),
        *map(_gallery, page.galleries),
        *(_closed(table.title, _table(table)) for table in page.facts),
        *map(_data, page.data),
        f'</main><script type="application/json" id="charts">{_json(specifications)}</script>',
        f"<script>{charts.bundle()}</script><script>{_resource('page.js')}</script></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


_SWITCH = (
    "<fieldset class=switch><legend>Horizontal axis</legend>"
    + "".join(
        f'<label><input type="radio" name="across" value="{name}"{" checked" if name == "epoch" else ""}> {label}</label>'
        for name, label in (("epoch", "epoch"), ("step", "step"), ("images", "images"), ("minutes", "time, minutes"))
    )
    + "</fieldset>"
)


def _figure(figure: Figure) -> str:
    title, caption = html.escape(figure.title), html.escape(figure.caption)
    chart = f"<div class=chart id=chart-{figure.name}></div>"
    return f"<figure><h2>{title}</h2>{chart}<figcaption>{caption}</figcaption></figure>"


def _gallery(gallery: Gallery) -> str:
    title, caption = html.escape(gallery.title), html.escape(gallery.caption)
    return f"<h2>{title}</h2><p class=soft>{caption}</p><div class=gallery>{''.join(map(_picture, gallery.pictures))}</div>"


def _picture(picture: Picture) -> str:
    text, name = html.escape(picture.text), html.escape(picture.name)
    images = "".join(f'<img src="{source}" alt="{name if i == 0 else ""}">' for i, source in enumerate(picture.sources))
    return f"<figure><div class=pair>{images}</div><figcaption><b>{text}</b><br>{name}</figcaption></figure>"


def _table(table: Table) -> str:
    head, *body = table.rows
    titles = "".join(f"<th scope=col>{html.escape(cell)}</th>" for cell in head)
    rows = "".join(f"<tr><th scope=row>{html.escape(name)}</th>{_cells(cells)}</tr>" for name, *cells in body)
    # A region that scrolls sideways can be reached with the keyboard.
    return (
        f'<div class=wide tabindex=0 role=region aria-label="{html.escape(table.title)}">'
        f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)


def _closed(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def _data(data: Data) -> str:
    text = f'<pre tabindex=0 class=csv id="data-{data.name}">{html.escape(data.csv())}</pre>'
    link = f'<p><a download="{data.name}.csv" data-of="{data.name}">Download {data.name}.csv</a></p>'
    return _closed(f"Data: {data.about} (CSV, {len(data.rows):,} rows)", link + text)


def _json(value: object) -> str:
    """JSON that cannot end its <script> element."""
    return json.dumps(value).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return (resources.files("worldsize.report") / name).read_text("utf-8")
