"""The charts of the page of ``worldsize eval --details``. Pure functions."""

from __future__ import annotations

import altair as alt

from worldsize.inference.details.summary import Details
from worldsize.report.charts import Figure, layered
from worldsize.report.data import Data

_MOST_CLASSES = 40  # in the chart of the confusion matrix


def of(details: Details, classes: tuple[str, ...]) -> tuple[list[Figure], list[Data]]:
    """The charts and the tables they draw."""
    made = [_reliability(details), _top_k(details)]
    if len(classes) <= _MOST_CLASSES:
        made.append(_confusion(details, classes))
    if len(details.by_size) > 1:
        made.append(_by_size(details))
    return [figure for figure, _ in made], [data for _, data in made]


def _table(name: str, about: str, rows: list[dict[str, object]]) -> Data:
    types = {key: "string" if isinstance(value, str) else "number" for key, value in rows[0].items()}
    return Data(name, about, types, rows)


def _reliability(details: Details) -> tuple[Figure, Data]:
    rows: list[dict[str, object]] = [
        {"confidence": one.confidence, "accuracy": one.accuracy, "images": one.images, "low": one.low, "high": one.high}
        for one in details.bins
    ]
    table = _table("reliability", "accuracy by confidence", rows)
    x = alt.X("confidence:Q", title="mean confidence", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    y = alt.Y("accuracy:Q", title="accuracy", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    line = alt.Chart().mark_line().encode(x, y)
    size = alt.Size("images:Q", legend=alt.Legend(orient="bottom"))
    points = alt.Chart().mark_point(filled=True).encode(x, y, size, tooltip=[f"{name}:Q" for name in table.columns])
    ideal = alt.Chart().transform_aggregate(bins="count()").transform_calculate(low="0", high="1")  # one line for all bins
    ideal = ideal.mark_rule(strokeDash=[5, 4], opacity=0.7).encode(
        *(alt.X("low:Q", title="mean confidence"), alt.X2("high"), alt.Y("low:Q", title="accuracy"), alt.Y2("high"))
    )
    scaled = (
        f", or {details.error_scaled:.2%} if the logits are divided by {details.temperature:.3g}, which was fitted on the "
        "same images."
    )
    fitted = scaled if details.doubt is None else f". {details.doubt}"
    caption = f"Dashed: confidence equals accuracy. Calibration error {details.error:.2%}{fitted}"
    return Figure("reliability", "Calibration", caption, layered(table, ideal, line, points)), table


def _top_k(details: Details) -> tuple[Figure, Data]:
    rows: list[dict[str, object]] = [{"k": k, "accuracy": value} for k, value in enumerate(details.top_k, 1)]
    table = _table("top_k", "accuracy over the number of guesses", rows)
    x = alt.X("k:O", title="guesses", axis=alt.Axis(labelAngle=0))
    y = alt.Y("accuracy:Q", scale=alt.Scale(zero=False), axis=alt.Axis(format="%"))
    line = alt.Chart().mark_line(point=True).encode(x, y, tooltip=["k:O", alt.Tooltip("accuracy:Q", format=".2%")])
    return Figure("top_k", "Top-k accuracy", "The label is among the k best classes.", layered(table, line)), table


def _confusion(details: Details, classes: tuple[str, ...]) -> tuple[Figure, Data]:
    share = details.confusion / details.confusion.sum(1, keepdims=True).clip(min=1)
    rows: list[dict[str, object]] = [
        {"label": a, "prediction": b, "share": float(share[i, j]), "images": int(details.confusion[i, j])}
        for i, a in enumerate(classes)
        for j, b in enumerate(classes)
    ]
    table = _table("confusion", "images by label and prediction", rows)
    x = alt.X("prediction:N", sort=list(classes), title="prediction")
    y = alt.Y("label:N", sort=list(classes), title="label")
    # The square root shows the few mistakes beside the many hits.
    color = alt.Color("share:Q", scale=alt.Scale(type="sqrt", domain=[0, 1]), legend=alt.Legend(orient="bottom", format="%"))
    tooltip = ["label:N", "prediction:N", "images:Q", alt.Tooltip("share:Q", format=".1%")]
    heat = alt.Chart().mark_rect().encode(x, y, color, tooltip=tooltip)
    chart = layered(table, heat, height=max(180, 22 * len(classes)))
    return Figure("confusion", "Confusion matrix", "Share of the images of each label.", chart), table


def _by_size(details: Details) -> tuple[Figure, Data]:
    rows: list[dict[str, object]] = [
        {"pixels": f"{low} to {high}", "accuracy": value, "images": count} for low, high, count, value in details.by_size
    ]
    table = _table("by_size", "accuracy by the shorter side of images", rows)
    x = alt.X("pixels:N", sort=None, title="shorter side, pixels", axis=alt.Axis(labelAngle=0))
    y = alt.Y("accuracy:Q", axis=alt.Axis(format="%"))
    bars = alt.Chart().mark_bar().encode(x, y, tooltip=["pixels:N", "images:Q", alt.Tooltip("accuracy:Q", format=".1%")])
    caption = "Groups of about as many images each."
    return Figure("by_size", "Accuracy over image size", caption, layered(table, bars)), table
