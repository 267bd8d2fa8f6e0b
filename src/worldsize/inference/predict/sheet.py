"""A page with images and their predictions: one self-contained HTML file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from worldsize.data.samples import Samples
from worldsize.data.survey.sheet import data_url, thumbnail
from worldsize.inference.predict.top import Row

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --soft: #5f6b7a; --card: #fff; --back: #f6f7f9; --bar: #1667c0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #a3adba; --card: #1b2027; --back: #12161b; --bar: #6cb0ff } }
body { font: 14px/1.4 system-ui, sans-serif; margin: 1rem; color: var(--ink); background: var(--back) }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px }
figure { margin: 0; padding: 8px; background: var(--card); border-radius: 6px; min-width: 0 }
img { width: 100%; aspect-ratio: 1; object-fit: contain; display: block }
figcaption { overflow-wrap: anywhere }
ol { list-style: none; margin: .3rem 0; padding: 0 }
li { display: flex; justify-content: space-between; gap: .5rem }
li:first-child { font-weight: 600 }
meter { display: block; width: 100%; height: .5rem }
.soft { color: var(--soft); font-size: .85em }
"""
_SHOWN = 3  # classes below an image


def write(
    path: Path, title: str, samples: Samples, rows: Sequence[Row], classes: Sequence[str], most: int, percent: bool
) -> None:
    """Write the first ``most`` images with their best classes; row i is about sample i.

    Args:
        percent: the values are probabilities, not logits.
    """
    shown = rows[:most]
    left_out = f"<p class=soft>The first {len(shown):,} of {len(rows):,} images.</p>" if len(shown) < len(rows) else ""
    figures = "\n".join(_figure(samples, i, row, classes, percent) for i, row in enumerate(shown))
    name = html.escape(title)
    path.write_text(
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{name}</title><style>{_STYLE}</style>\n<h1>{name}</h1>{left_out}\n<main>\n{figures}\n</main></html>\n",
        "utf-8",
        errors="replace",
    )


def _figure(samples: Samples, index: int, row: Row, classes: Sequence[str], percent: bool) -> str:
    name = html.escape(row.name)
    source = data_url(thumbnail(samples, index))
    if row.broken is not None:
        answer = f"<p>broken: {html.escape(row.broken)}</p>"
    else:
        best = list(zip(row.indices, row.values, strict=True))[:_SHOWN]
        items = [(html.escape(classes[i]), f"{value:.1%}" if percent else f"{value:.3f}") for i, value in best]
        bar = f'<meter value="{row.values[0]:.4f}" aria-label="probability"></meter>' if percent else ""
        answer = f"{bar}<ol>{''.join(f'<li><span>{name}</span><span>{value}</span></li>' for name, value in items)}</ol>"
    return (
        f'<figure><img src="{source}" alt="{name}"><figcaption>{answer}<span class=soft>{name}</span></figcaption></figure>'
    )
