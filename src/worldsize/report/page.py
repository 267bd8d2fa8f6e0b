"""One HTML file with charts and tables that needs no network, and no JavaScript for its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from worldsize import pages
from worldsize.pages import Table
from worldsize.report import charts
from worldsize.report.charts import Figure
from worldsize.report.data import Data

# What the switch of the horizontal axis offers, by the names of the columns.
_AXES = {"epoch": "epoch", "step": "step", "images": "images", "minutes": "time, minutes"}


@dataclass(frozen=True)
class Example:
    """One or two images side by side, as sources of <img>, with what is said of them and their ``name``."""

    sources: Sequence[str]
    text: str
    name: str


@dataclass(frozen=True)
class Gallery:
    """Images with a heading and a caption."""

    title: str
    caption: str
    examples: Sequence[Example]


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
    return pages.render(
        "report.html",
        title=page.title,
        page=page,
        axes=list(_AXES.items()) if moving else [],
        specifications=specifications,
        library=pages.script(charts.bundle()),
    )
