"""A chart as an Altair specification that names its table; `page` and `svg` add the data. Pure functions."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import altair as alt

from worldsize.errors import UserError
from worldsize.report.data import Data

Specification = dict[str, Any]
TIMES = {
    "data_ms": "waiting for images",
    "copy_ms": "copying images to the GPU",
    "compute_ms": "computing",
    "communication_ms": "waiting for other ranks",
}


@dataclass(frozen=True)
class Figure:
    """A chart with its heading and what a reader cannot see in it."""

    name: str
    title: str
    caption: str
    chart: alt.TopLevelMixin

    def specification(self) -> Specification:
        """Vega-Lite as plain JSON, without data."""
        # Vega makes the description the label that screen readers read.
        return json.loads(self.chart.to_json(validate=True)) | {"description": f"{self.title}. {self.caption}"}


def svg(figure: Figure, tables: list[Data]) -> str:
    """The chart as an SVG file, drawn without a browser."""
    import vl_convert

    specification = figure.specification() | {"width": 640, "background": "white", "title": figure.title}
    [table] = [t for t in tables if t.name == specification["data"]["name"]]
    # Names of folders may be no text, which vl_convert refuses.
    specification["data"] |= {"values": table.csv().encode("utf-8", "backslashreplace").decode()}
    for layer in specification["layer"]:
        if layer["encoding"]["x"].get("field") == "x":
            layer["encoding"]["x"]["title"] = "epoch"
    return vl_convert.vegalite_to_svg(specification)


@functools.cache  # a second
def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that defines ``vegaEmbed``.

    Raises:
        UserError: vl-convert is missing.
    """
    try:
        import vl_convert
    except ImportError:
        raise UserError("reports need vl-convert: pip install 'worldsize[report]'") from None
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def layered(table: Data, *layers: alt.Chart, height: int = 260) -> alt.LayerChart:
    source = alt.NamedData(name=table.name, format=alt.CsvDataFormat(type="csv", parse=table.columns))
    return alt.layer(*layers, data=source).properties(width="container", height=height)


def legend() -> alt.Legend:
    """Below the chart, one entry per line, as wide as a phone."""
    return alt.Legend(orient="bottom", title=None, columns=1, labelLimit=320, symbolOpacity=1, symbolStrokeWidth=2)


def bars(table: Data, row: str, rows: int) -> alt.LayerChart:
    """A horizontal bar for each value of the expression ``row``, stacked from the mean times."""
    y = alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelLimit=170))
    bars = alt.Chart().mark_bar().encode(alt.X("ms:Q", title="ms", stack="zero"), y, cause())
    chart = folded(layered(table, bars, height=max(60, 30 * rows))).transform_calculate(row=row)
    return chart.transform_aggregate(ms="mean(ms)", groupby=["row", "cause"])


def folded(chart: alt.LayerChart) -> alt.LayerChart:
    """The chart with one row (cause, ms) for each of the times."""
    fold = chart.transform_fold(list(TIMES), as_=["cause", "ms"])
    return fold.transform_calculate(cause=_words()).transform_filter("isValid(datum.ms)")


def _words() -> str:
    """A Vega expression: what the column with the name ``datum.cause`` measures."""
    return f"{json.dumps(TIMES)}[datum.cause]"


def cause() -> alt.Color:
    return alt.Color("cause:N", sort=list(TIMES.values()), legend=legend())
