"""The charts of a page about benchmarks and plans. Pure functions."""

from __future__ import annotations

import altair as alt

from worldsize.report.charts import TIMES, Figure, bars, layered, legend
from worldsize.report.data import MEASURED, OWN, PUBLISHED, SHARED, Data

_WORLD = "datum.world_size + ': ' + datum.series"


def of_bench(tables: list[Data], kind: str) -> list[Figure]:
    """The charts for the tables of `data.of_bench`; ``kind`` as in `reading.Bench`."""
    table = tables[0]
    if kind == "speed":
        return [Figure("bench", "Images/s", "One point per round; the line marks the median.", _points(table))]
    if kind == "network":
        bandwidth = "Of an all-reduce, as nccl-tests defines it: 2 (n - 1) / n bytes per byte of the message."
        time = "Of one all-reduce, the median; shaded: 10th to 90th percentile."
        return [
            Figure("bandwidth", "Bus bandwidth over message size", bandwidth, _messages(table, "bus_gb_per_s", "GB/s")),
            Figure("latency", "Time over message size", time, _messages(table, "us", "microseconds")),
        ]
    return _of_scaling({table.name: table for table in tables})


def _of_scaling(tables: dict[str, Data]) -> list[Figure]:
    table = tables["bench"]
    measured = [row for row in table.rows if "predicted" not in row]
    shared = any(row["cores"] == SHARED for row in measured)
    captions = [
        *(["Points: rounds. Line: median. Shaded: smallest to largest."] if measured else []),
        *(["Dashed: no loss against the smallest world size."] if measured else []),
        *(["Crosses: oversubscribed, more processes than cores or GPUs."] if shared else []),
        *(["Dotted: predicted, with its 5th to 95th percentile."] if len(measured) < len(table.rows) else []),
    ]
    first = min((row["world_size"] for row in measured), default=None)
    found = [Figure("scaling", "Images/s per process over world size", " ".join(captions), _scaling(table, first))]
    if first is not None:
        caption = "All processes together. Dashed: no loss against the smallest world size. Both axes are logarithmic."
        found.append(Figure("total", "Images/s in total over world size", caption, _total(table, first)))
    if "efficiency" in tables:
        caption = (
            "Images/s per process relative to the smallest world size of the same kind; dashed: 100 %. Gray diamonds: "
            "published results of other systems on GPUs, for orientation; the table below has their sources."
        )
        found.append(Figure("efficiency", "Efficiency over world size", caption, _efficiency(tables["efficiency"])))
    if "steps" in tables:
        caption = "A line for each kind and size, the mean over its rounds; warm-up steps are left out."
        found.append(Figure("steps", "Images/s per process over the steps", caption, _over_steps(tables["steps"])))
    if measured and TIMES.keys() - {"copy_ms"} <= table.columns.keys():  # older files have no copy_ms
        rows = {(row["series"], row["world_size"]) for row in measured}
        caption = "By world size: mean over rounds and ranks, milliseconds."
        found.append(Figure("time", "Time of a step", caption, bars(table, _WORLD, len(rows))))
    return found


def _x() -> alt.X:
    return alt.X(
        "world_size:Q", title="world size (processes)", scale=alt.Scale(type="log", base=2), axis=alt.Axis(format="d")
    )


def _total(table: Data, first: int) -> alt.LayerChart:
    x, color, log = _x(), alt.Color("series:N", legend=legend()), alt.Scale(type="log")
    title = "images/s"
    chart = alt.Chart().transform_filter("isValid(datum.images_per_s)")
    tooltip = ["series:N", "world_size:Q", "round:Q", "cores:N", alt.Tooltip("images_per_s:Q", format=".4~g")]
    y = alt.Y("images_per_s:Q", title=title, scale=log)
    points = chart.mark_point(filled=True, opacity=0.6).encode(x, y, color, _shape(), tooltip=tooltip)
    middle = chart.mark_line().encode(x, alt.Y("median(images_per_s):Q", title=title, scale=log), color)
    ideal = chart.transform_calculate(one=f"datum.world_size == {first} ? datum.images_per_s_per_process : null")
    ideal = ideal.transform_joinaggregate(one="median(one)", groupby=["series"])
    ideal = ideal.transform_calculate(ideal="datum.one * datum.world_size")
    ideal = ideal.mark_line(strokeDash=[5, 4], opacity=0.7).encode(x, alt.Y("ideal:Q", title=title, scale=log), color)
    return layered(table, ideal, middle, points)


def _efficiency(table: Data) -> alt.LayerChart:
    title = "efficiency"
    x, color = _x(), alt.Color("series:N", legend=legend())
    y = alt.Y("efficiency:Q", title=title, axis=alt.Axis(format="%"), scale=alt.Scale(zero=True))
    shape = alt.Shape("kind:N", legend=legend(), scale=alt.Scale(domain=[MEASURED, PUBLISHED], range=["circle", "diamond"]))
    percent = alt.Tooltip("efficiency:Q", format=".1%")
    own = alt.Chart().transform_filter(f"datum.kind == '{MEASURED}'")
    points = own.mark_point(filled=True, opacity=0.6).encode(
        *(x, y, color, shape), tooltip=["series:N", "world_size:Q", "round:Q", percent]
    )
    middle = own.mark_line().encode(x, alt.Y("median(efficiency):Q", title=title), color)
    ideal = alt.Chart().transform_aggregate(low="min(world_size)", high="max(world_size)").transform_calculate(one="1")
    ideal = ideal.mark_rule(strokeDash=[5, 4], opacity=0.7).encode(
        alt.X("low:Q", title="world size (processes)"), alt.X2("high"), alt.Y("one:Q", title=title)
    )
    others = alt.Chart().transform_filter(f"datum.kind == '{PUBLISHED}'").mark_point(filled=True, size=60, color="#888888")
    others = others.encode(x, y, shape, tooltip=["series:N", "world_size:Q", percent, "source:N"])
    return layered(table, others, ideal, middle, points)


def _over_steps(table: Data) -> alt.LayerChart:
    y = alt.Y("images_per_s_per_process:Q", title="images/s per process", scale=alt.Scale(zero=True))
    x = alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d"))
    tooltip = ["line:N", "step:Q", alt.Tooltip("images_per_s_per_process:Q", format=".4~g")]
    return layered(table, alt.Chart().mark_line().encode(x, y, alt.Color("line:N", legend=legend()), tooltip=tooltip))


def _shape() -> alt.Shape:
    return alt.Shape("cores:N", legend=None, scale=alt.Scale(domain=[OWN, SHARED], range=["circle", "cross"]))


def _points(table: Data) -> alt.LayerChart:
    # The same for both layers; "-x" would be another order for each, about which Vega-Lite warns.
    fastest = alt.EncodingSortField("images_per_s", op="median", order="descending")
    y = alt.Y("series:N", title=None, sort=fastest, axis=alt.Axis(labelLimit=140))
    points = alt.Chart().mark_point(filled=True, opacity=0.6).encode(alt.X("images_per_s:Q", title="images/s"), y)
    ticks = alt.Chart().mark_tick(thickness=2, size=16).encode(alt.X("median(images_per_s):Q", title="images/s"), y)
    return layered(table, points, ticks, height=max(60, 30 * len({row["series"] for row in table.rows})))


def _messages(table: Data, name: str, title: str) -> alt.LayerChart:
    x = alt.X("bytes:Q", title="message, bytes", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s", tickCount=6))
    log = alt.Scale(type="log")
    color = alt.Color("series:N", legend=legend())
    tooltip = ["series:N", alt.Tooltip("bytes:Q", format=","), alt.Tooltip(f"{name}:Q", format=".4~g")]
    line = alt.Chart().mark_line(point=True).encode(x, alt.Y(f"{name}:Q", title=title, scale=log), color, tooltip=tooltip)
    if name != "us":
        return layered(table, line)
    spread = (
        alt.Chart().mark_area(opacity=0.2).encode(x, alt.Y("low_us:Q", title=title, scale=log), alt.Y2("high_us"), color)
    )
    return layered(table, spread, line)


def _scaling(table: Data, first: int | None) -> alt.LayerChart:
    """``first``: the smallest world size that was measured; None: all is predicted."""
    x, color = _x(), alt.Color("series:N", legend=legend())
    layers = [] if first is None else _measured(x, color, first)
    if "predicted" in table.columns:
        layers += _predicted(x, color)
    return layered(table, *layers)


def _measured(x: alt.X, color: alt.Color, first: int) -> list[alt.Chart]:
    name, title = "images_per_s_per_process", "images/s per process"
    y = alt.Y(f"{name}:Q", title=title, scale=alt.Scale(zero=True))
    chart = alt.Chart().transform_filter(f"isValid(datum.{name})")
    points = chart.mark_point(filled=True, opacity=0.6).encode(
        *(x, y, color, _shape()),
        tooltip=["series:N", "world_size:Q", "round:Q", "cores:N", alt.Tooltip(f"{name}:Q", format=".4~g")],
    )
    middle = chart.mark_line().encode(x, alt.Y(f"median({name}):Q", title=title), color)
    spread = chart.mark_area(opacity=0.2).encode(x, alt.Y(f"min({name}):Q", title=title), alt.Y2(f"max({name}):Q"), color)
    ideal = chart.transform_calculate(one=f"datum.world_size == {first} ? datum.{name} : null")
    ideal = ideal.transform_joinaggregate(ideal="median(one)", groupby=["series"])
    ideal = ideal.mark_line(strokeDash=[5, 4], opacity=0.7).encode(x, alt.Y("ideal:Q", title=title), color)
    return [spread, ideal, middle, points]


def _predicted(x: alt.X, color: alt.Color) -> list[alt.Chart]:
    title = "images/s per process"
    chart = alt.Chart().transform_filter("isValid(datum.predicted)")
    ends = alt.Y("predicted_low:Q", title=title, scale=alt.Scale(zero=True)), alt.Y2("predicted_high")
    numbers = [alt.Tooltip(f"predicted{end}:Q", format=".4~g") for end in ("", "_low", "_high")]
    line = chart.mark_line(strokeDash=[2, 3], point=True)
    line = line.encode(x, alt.Y("predicted:Q", title=title), color, tooltip=["series:N", "world_size:Q", *numbers])
    return [chart.mark_area(opacity=0.15).encode(x, *ends, color), line]
