"""The page of ``worldsize replay``: one self-contained HTML file about one step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from worldsize import pages
from worldsize.reproduce.compare import StepDifference, processes
from worldsize.reproduce.promise import Promise
from worldsize.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Replay:
    """The steps ``first`` to ``last``: the run's records, and those computed again from step ``start``.

    ``difference`` is the first one; ``broken`` the first that breaks the ``promise``, of all steps since ``start``.
    """

    first: int
    last: int
    start: int
    procs: int
    promise: Promise
    recorded: list[dict[str, Any]]
    again: list[dict[str, Any]]
    difference: StepDifference | None
    broken: StepDifference | None
    page: Path


@dataclass(frozen=True)
class Seen:
    """A step as `training.step_recorder` recorded it: arrays over all ranks' samples in order, norms by parameter."""

    arrays: dict[str, NDArray[Any]]
    classes: list[str]
    norms: dict[str, dict[str, float]]


def read_step(folder: Path, step: int, ranks: int) -> Seen:
    """The step's files of all ranks."""
    parts = [dict(np.load(folder / f"step-{step}.rank-{rank}.npz")) for rank in range(ranks)]
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return Seen(arrays, **json.loads((folder / f"step-{step}.json").read_text("utf-8")))


@dataclass(frozen=True)
class _Shown:
    """An image as the page shows it. ``share``: how much of a mixed image has the label; empty if it is not mixed."""

    source: str
    name: str
    label: str
    share: str
    prediction: str
    loss: str
    probability: str

    @property
    def wrong(self) -> bool:
        return self.label != self.prediction


def write(out: Path, run: RunFolder, result: Replay, seen: Seen) -> None:
    """Write the page."""
    images = _images(seen)
    losses = seen.arrays["losses"]
    text = pages.render(
        "replay.html",
        title=f"{run.name}, step {result.first:,}",
        identical=result.difference is None,
        outcome="Bit-identical." if result.difference is None else f"Different from step {result.difference.step:,}.",
        origin=f"Computed again from step {result.start:,} with {processes(result.procs)}.",
        tiles=[
            ("images", f"{len(images):,}"),
            ("wrong predictions", f"{sum(image.wrong for image in images):,}"),
            ("mean loss", f"{losses.mean():.4g}"),
            ("highest loss", f"{losses.max():.4g}"),
        ],
        steps=pages.Table("Steps" if result.last > result.first else "Step", _steps(result)),
        images=images,
        mixed=any(image.share for image in images),
        norms=pages.Table("Norms by parameter", _norms(seen)),
    )
    out.write_text(text, "utf-8")


def _steps(result: Replay) -> pages.Rows:
    names = ("lr", "loss", "top1", "grad_norm", "step_ms", "data_ms", "communication_ms")
    rows: list[tuple[str, ...]] = [("step", *names)]
    for one, other in zip(result.recorded, result.again, strict=True):
        rows.append((f"{one['step']:,}, recorded", *(_number(one[name]) for name in names)))
        rows.append((f"{one['step']:,}, computed again", *(_number(other[name]) for name in names)))
    return rows


def _images(seen: Seen) -> list[_Shown]:
    arrays, classes = seen.arrays, seen.classes
    highest = np.nan_to_num(arrays["losses"], nan=np.inf)  # NaN would come last
    return [
        _Shown(
            source=pages.data_uri(Image.fromarray(arrays["pixels"][i])),  # PNG: exactly the pixels of the model
            name=str(arrays["names"][i]),
            label=_named(arrays["labels"][i], classes),
            share="" if arrays["shares"][i] == 1 else f"{arrays['shares'][i]:.0%}",
            prediction=_named(arrays["predictions"][i], classes),
            loss=f"{arrays['losses'][i]:.4f}",
            probability=f"{arrays['probabilities'][i]:.3f}",
        )
        for i in np.argsort(-highest, kind="stable")
    ]


def _named(labels: NDArray[np.integer[Any]], classes: list[str]) -> str:
    """The name of a label, or of several: 0 or 1 for each class."""
    numbers = np.flatnonzero(labels) if labels.ndim else [int(labels)]
    return ", ".join(classes[i] for i in numbers) or "no label"


def _norms(seen: Seen) -> pages.Rows:
    rows: list[tuple[str, ...]] = [("parameter", "gradient", "weight", "update", "update / weight", "")]
    largest = max((n["update"] / max(n["weight"], 1e-12) for n in seen.norms.values()), default=1.0) or 1.0
    for name, norms in seen.norms.items():
        ratio = norms["update"] / max(norms["weight"], 1e-12)
        numbers = (f"{norms[key]:.3e}" for key in ("gradient", "weight", "update"))
        rows.append((name, *numbers, f"{ratio:.2e}", pages.bar(ratio / largest)))
    return rows


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value)
