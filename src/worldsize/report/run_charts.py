"""The charts of a page about runs. Pure functions.

The horizontal axis of learning curves is the parameter ``across``, which the page changes: the name of a column.
"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from worldsize.report import timeline
from worldsize.report.charts import Figure, bars, cause, folded, layered, legend
from worldsize.report.data import STEP_PARTS, Data
from worldsize.report.measures import Measure

# Of a metric by its column: heading and caption.
_SCORES = {
    "top1": ("Top-1 accuracy", "Dashed: validation images. Training images may be augmented."),
    "map": ("mAP", "Of the validation images: the mean over classes of their average precision."),
    "f1": ("F1", "Of the validation images, over all labels: those with a probability above 0.5 are predicted."),
}


def of_runs(tables: list[Data], measured: Sequence[Measure]) -> list[Figure]:
    """The charts for the tables of `data.of_runs`, whose runs are ``measured`` by these."""
    found = []
    for table in tables:
        if table.name == "curves":
            found += _curves(table, measured)
        elif table.name == "speed":
            found += [
                Figure("speed", "Images/s per process", "Training steps only.", _rate(table)),
                Figure("time", "Time of a step", "Mean over ranks, milliseconds.", _step_time(table)),
            ]
        elif table.name == "parts":
            caption = f"{table.about[0].upper()}{table.about[1:]}. `worldsize explain` says more."
            found.append(Figure("parts", "Where the time of a step goes", caption, _parts(table)))
        elif table.name == "ranks":
            caption = "Images/s without communication: a darker row slows down all others."
            found.append(Figure("ranks", "Speed of each rank", caption, _ranks(table)))
        else:
            caption = "Each bar is a start of the run on a machine or pod; triangles are checkpoints, circles evaluations."
            found.append(Figure("timeline", "Starts, ends, checkpoints and evaluations", caption, _timeline(table)))
    return found


def _curves(table: Data, measured: Sequence[Measure]) -> list[Figure]:
    """Those with a value: a run without steps has no learning rate, mAP is that of evaluations only. Vega draws a chart
    without any value endlessly tall."""
    scores = [(one.column, *_SCORES[one.column], one.name, "%") for measure in measured for one in measure.shown]
    seeds = "Shaded: smallest to largest over seeds."
    every = [
        ("loss", "Loss", f"Dashed: validation images. {seeds}", "loss", "~g"),
        *scores,
        ("lr", "Learning rate", "Of the first parameter group, at each step.", "lr", "~g"),
        ("grad_norm", "Gradient norm", f"L2 norm before clipping. {seeds}", "gradient norm", "~g"),
    ]
    known = [one for one in every if any(row.get(one[0]) is not None for row in table.rows)]
    return [
        Figure("norm" if column == "grad_norm" else column, title, caption, _curve(table, column, name, form))
        for column, title, caption, name, form in known
    ]


def _across() -> alt.X:
    return alt.X("x:Q", title=None, scale=alt.Scale(zero=False, nice=False), axis=alt.Axis(tickCount=6, labelOverlap=True))


def _moving(chart: alt.LayerChart) -> alt.LayerChart:
    """The chart over the column that the parameter ``across`` names."""
    return chart.transform_calculate(x="datum[across]").add_params(alt.param(name="across", value="epoch"))


def _curve(table: Data, name: str, title: str, form: str) -> alt.LayerChart:
    known = f"isValid(datum.{name})"
    y = alt.Y(f"{name}:Q", title=title, axis=alt.Axis(format=form), scale=alt.Scale(zero=False))
    color = alt.Color("series:N", legend=legend())
    dash = alt.StrokeDash("part:N", legend=None, scale=alt.Scale(domain=["training", "evaluation"], range=[[1, 0], [6, 3]]))
    area = alt.Chart().mark_area(opacity=0.2).transform_filter(known)
    area = area.encode(_across(), alt.Y(f"{name}_low:Q", title=title), alt.Y2(f"{name}_high"), color, detail="part:N")
    tooltip = ["series:N", "part:N", "step:Q", "epoch:Q", alt.Tooltip(f"{name}:Q", format=".5~g")]
    line = (
        alt.Chart().mark_line(point={"size": 12}).transform_filter(known).encode(_across(), y, color, dash, tooltip=tooltip)
    )
    return _moving(layered(table, area, line))


def _rate(table: Data) -> alt.LayerChart:
    y = alt.Y("images_per_s_per_process:Q", title="images/s per process")
    line = alt.Chart().mark_line().encode(_across(), y, alt.Color("run:N", legend=legend()))
    return _moving(layered(table, line))


def _step_time(table: Data) -> alt.LayerChart:
    """Over time for one run; one bar per run for several."""
    runs = {row["run"] for row in table.rows}
    if len(runs) > 1:
        return bars(table, "datum.run", len(runs))
    area = alt.Chart().mark_area().encode(_across(), alt.Y("ms:Q", title="ms", stack="zero"), cause())
    return _moving(folded(layered(table, area)))


def _ranks(table: Data) -> alt.LayerChart:
    heat = (
        alt.Chart()
        .mark_rect()
        .encode(
            alt.X("step:O", title="step", axis=alt.Axis(labelOverlap="parity", labelAngle=0)),
            alt.Y("place:N", title="rank", sort=None),
            alt.Color(
                "images_per_s:Q", title="images/s", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(orient="bottom")
            ),
            tooltip=["run:N", "rank:Q", "step:Q", alt.Tooltip("images_per_s:Q", format=".4~g")],
        )
    )
    several = len({row["run"] for row in table.rows}) > 1
    places = len({(row["run"], row["rank"]) for row in table.rows})
    chart = layered(table, heat, height=max(60, min(600, 24 * places)))
    return chart.transform_calculate(place="datum.run + ' ' + datum.rank" if several else "toString(datum.rank)")


def _parts(table: Data) -> alt.LayerChart:
    rows = len({row["row"] for row in table.rows})
    scale = alt.Scale(domain=_present(table, "part"), scheme="tableau20")
    color = alt.Color("part:N", sort=None, legend=legend(), scale=scale)
    bars = alt.Chart().mark_bar()
    bars = bars.transform_calculate(order=f"indexof({list(STEP_PARTS.values())}, datum.part)").encode(
        alt.X("ms:Q", title="ms", stack="zero"),
        alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelLimit=170)),
        color,
        order="order:Q",
        tooltip=["row:N", "part:N", alt.Tooltip("ms:Q", format=".3~g")],
    )
    return layered(table, bars, height=max(60, 30 * rows))


def _timeline(table: Data) -> alt.LayerChart:
    rows = len({row["row"] for row in table.rows})
    colors = ["#1b8a4c", "#1667c0", "#c7343b", "#8a6a14", "#7b4bc0", "#d9730d"]
    known = _present(table, "what")
    scale = alt.Scale(domain=known, range=[colors[timeline.WHAT.index(name)] for name in known])
    color = alt.Color("what:N", scale=scale, legend=legend())
    x = alt.X("begin:Q", title="minutes since the first start")
    y = alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelLimit=170))
    bars = alt.Chart().mark_bar(height=10).transform_filter("isValid(datum.end)")
    bars = bars.encode(x, y, color, alt.X2("end"), tooltip=["run:N", "row:N", "what:N", "begin:Q", "end:Q"])
    layers = [bars]
    for what, shape, below in ((timeline.CHECKPOINT, "triangle-up", 12), (timeline.EVALUATION, "circle", -12)):
        points = alt.Chart().mark_point(shape=shape, filled=True, size=40, yOffset=below)
        points = points.transform_filter(f"datum.what == '{what}'")
        layers.append(points.encode(x, y, color, tooltip=["run:N", "what:N", "begin:Q"]))
    return layered(table, *layers, height=max(70, 40 * rows))


def _present(table: Data, column: str) -> list[str]:
    """The values of a column in the order of their meaning."""
    values = {row[column] for row in table.rows}
    return [name for name in (*STEP_PARTS.values(), *timeline.WHAT) if name in values]
