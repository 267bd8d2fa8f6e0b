"""A page with images and their predictions: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from worldsize import pages
from worldsize.data.samples import Samples
from worldsize.data.survey.sheet import data_uri, thumbnail
from worldsize.inference.predict.top import Row

_SHOWN = 3  # classes below an image


def write(
    path: Path, title: str, samples: Samples, rows: Sequence[Row], classes: Sequence[str], most: int, percent: bool
) -> None:
    """Write the first ``most`` images with their best classes; row i is about sample i.

    Args:
        percent: the values are probabilities, not logits.
    """
    shown = rows[:most]
    text = pages.render(
        "predictions.html",
        title=title,
        left_out=f"The first {len(shown):,} of {len(rows):,} images." if len(shown) < len(rows) else None,
        images=[_image(samples, i, row, classes, percent) for i, row in enumerate(shown)],
    )
    path.write_text(text, "utf-8")


def _image(samples: Samples, index: int, row: Row, classes: Sequence[str], percent: bool) -> dict[str, object]:
    """An image as the page shows it."""
    best = list(zip(row.indices, row.values, strict=True))[:_SHOWN]
    return {
        "source": data_uri(thumbnail(samples, index)),
        "name": row.name,
        "broken": row.broken,
        "probability": row.values[0] if percent and row.broken is None else None,
        "best": [(classes[i], f"{value:.1%}" if percent else f"{value:.3f}") for i, value in best],
    }
