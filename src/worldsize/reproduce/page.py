"""The page of ``worldsize replay``: one self-contained HTML file about one step."""

from __future__ import annotations

import base64
import html
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from worldsize import checkpoint
from worldsize.reproduce.compare import Replay, processes
from worldsize.runs.run_folder import RunFolder

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { text-align: right; padding: .15rem .8rem; border-bottom: 1px solid #e4e7eb }
th:first-child, td:first-child { text-align: left } th { font-weight: 600 }
.bar { display: inline-block; height: .6rem; background: #4c78a8 }
.grid { display: flex; flex-wrap: wrap; gap: .8rem }
figure { margin: 0; width: 132px; font-size: 12px; line-height: 1.3; overflow-wrap: anywhere }
figure img { width: 128px; height: 128px; object-fit: contain; image-rendering: pixelated; border: 2px solid #2e7d32 }
figure.wrong img { border-color: #c62828 } .muted { color: #68707a }
"""


@dataclass(frozen=True)
class Seen:
    """A step as `training.step_recorder` recorded it: arrays over all ranks' samples in order, norms by parameter."""

    arrays: dict[str, NDArray[Any]]
    norms: dict[str, dict[str, float]]


def read_step(folder: Path, step: int, ranks: int) -> Seen:
    """The step's files of all ranks."""
    parts = [dict(np.load(folder / f"step-{step}.rank-{rank}.npz")) for rank in range(ranks)]
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return Seen(arrays, json.loads((folder / f"step-{step}.json").read_text("utf-8")))


def write(out: Path, run: RunFolder, result: Replay, seen: Seen) -> None:
    """Write the page."""
    newest = checkpoint.list_checkpoints(run.checkpoints)[0]
    classes = json.loads((newest / "state.json").read_text("utf-8"))["classes"]
    title = f"{run.name}, step {result.first:,}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        _summary(result),
        "<h2>Images, as the model saw them, highest loss first</h2>",
        f"<div class=grid>{''.join(_figures(seen, classes))}</div>",
        "<h2>Norms by parameter</h2>",
        _norms(seen),
    ]
    out.write_text("\n".join(parts) + "\n", "utf-8")


def _summary(result: Replay) -> str:
    same = "bit-identical" if result.difference is None else f"different from step {result.difference.step:,}"
    names = ("lr", "loss", "top1", "grad_norm", "step_ms", "data_ms", "communication_ms")
    rows: list[tuple[str, ...]] = [("step", *names)]
    for one, other in zip(result.recorded, result.again, strict=True):
        rows.append((f"{one['step']:,}, recorded", *(_number(one[name]) for name in names)))
        rows.append((f"{one['step']:,}, computed again", *(_number(other[name]) for name in names)))
    head = f"<p>Computed again from step {result.start:,} with {processes(result.procs)}: {same}.</p>"
    return head + _table(rows)


def _figures(seen: Seen, classes: list[str]) -> list[str]:
    arrays = seen.arrays
    found = []
    for i in np.argsort(-arrays["losses"], kind="stable"):
        label, prediction = (_named(arrays[key][i], classes) for key in ("labels", "predictions"))
        wrong = " class=wrong" if label != prediction else ""
        found.append(
            f'<figure{wrong}><img alt="" src="{_image(arrays["pixels"][i])}"><figcaption>'
            f"<b>{html.escape(label)}</b>, predicted {html.escape(prediction)}<br>"
            f"loss {arrays['losses'][i]:.4f}, p {arrays['probabilities'][i]:.3f}<br>"
            f"<span class=muted>{html.escape(str(arrays['names'][i]))}</span></figcaption></figure>"
        )
    return found


def _named(labels: NDArray[np.integer[Any]], classes: list[str]) -> str:
    """The name of a label, or of several: 0 or 1 for each class."""
    numbers = np.flatnonzero(labels) if labels.ndim else [int(labels)]
    return ", ".join(classes[i] for i in numbers) or "no label"


def _image(pixels: NDArray[np.uint8]) -> str:
    """The image as a data URL, without loss."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _norms(seen: Seen) -> str:
    rows: list[tuple[str, ...]] = [("parameter", "gradient", "weight", "update", "update / weight", "")]
    largest = max((n["update"] / max(n["weight"], 1e-12) for n in seen.norms.values()), default=1.0) or 1.0
    for name, norms in seen.norms.items():
        ratio = norms["update"] / max(norms["weight"], 1e-12)
        bar = f"<span class=bar style='width:{min(ratio / largest, 1) * 120:.0f}px'></span>"
        numbers = (f"{norms[key]:.3e}" for key in ("gradient", "weight", "update"))
        rows.append((html.escape(name), *numbers, f"{ratio:.2e}", bar))
    return _table(rows)


def _table(rows: list[tuple[str, ...]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value)
