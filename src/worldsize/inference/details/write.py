"""Writes the details of an evaluation: a page, JSON and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from worldsize.config import output_files
from worldsize.data.samples import Samples
from worldsize.data.survey.sheet import data_uri, thumbnail
from worldsize.inference.details import charts, gradcam
from worldsize.inference.details.collected import Answers
from worldsize.inference.details.measures import Ints
from worldsize.inference.details.summary import Details, Other
from worldsize.inference.trained import Trained
from worldsize.pages import Table
from worldsize.report import page
from worldsize.report.page import Example, Gallery, Page

_MISTAKES, _HITS, _PAIRS, _OF_PAIR, _DIFFERENT = 24, 12, 6, 3, 12


def numbers(
    folder: Path, details: Details, network: dict[str, str], answers: Answers, samples: Samples, other: Other | None
) -> None:
    """Write details.json, classes.csv, confusion.csv and images.csv into ``folder``.

    Args:
        network: see `trained.identity`.

    Raises:
        UserError, StoreUnreachable: one cannot be written; no part of it stays.
    """
    classes = samples.classes
    content = {"network": network, **details.as_json(classes)} | ({} if other is None else {"against": other.as_json()})
    with output_files.written(folder / "details.json"):
        (folder / "details.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    rows = [(name, *vars(one).values()) for name, one in zip(classes, details.of_classes, strict=True)]
    _csv(folder / "classes.csv", ("class", "precision", "recall", "f1", "support"), rows)
    matrix = [(name, *row) for name, row in zip(classes, details.confusion.tolist(), strict=True)]
    _csv(folder / "confusion.csv", ("label", *classes), matrix)
    _csv(folder / "images.csv", *_images(details, answers, samples, other))


def _images(
    details: Details, answers: Answers, samples: Samples, other: Other | None
) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Titles and rows of images.csv."""
    classes = samples.classes
    titles = ("image", "label", "prediction", "label_probability", "confidence")
    numbers = zip(answers.indices.tolist(), answers.labels.tolist(), answers.predictions.tolist(), strict=True)
    values = zip(details.label_probability.tolist(), details.confidence.tolist(), strict=True)
    rows: list[tuple[object, ...]] = [
        (samples.name(i), classes[a], classes[b], f"{p:.7g}", f"{q:.7g}")
        for (i, a, b), (p, q) in zip(numbers, values, strict=True)
    ]
    if other is None:
        return titles, rows
    theirs = zip(other.predictions.tolist(), other.label_probability.tolist(), strict=True)
    cells = [(classes[b], f"{p:.7g}") if b >= 0 else ("", "") for b, p in theirs]
    both: list[tuple[object, ...]] = [(*row, *cell) for row, cell in zip(rows, cells, strict=True)]
    return (*titles, "other_prediction", "other_label_probability"), both


def _csv(path: Path, titles: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
    with output_files.written(path), open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(titles)
        writer.writerows(rows)


def write_page(
    path: Path, title: str, details: Details, answers: Answers, samples: Samples, found: Trained, other: Other | None
) -> None:
    """Write the page.

    Raises:
        OSError: it cannot be written.
    """
    classes = samples.classes
    figures, tables = charts.of(details, classes)
    low, high = details.interval
    verdict = (
        f"Top-1 {details.top1:.2%} on {len(answers.labels):,} images; 95 % interval (bootstrap) {low:.2%} to {high:.2%}. "
        f"Calibration error {details.error:.2%}."
    )
    shown = [Table("Most confused", _pairs(details, classes))] if details.pairs else []
    if other is not None:
        verdict += f" {other.name}: top-1 {other.top1:.2%}. {other.counts}"
        shown.append(Table(f"Compared with {other.name}", _comparison(other)))
    built = Page(
        title=title,
        verdict=verdict,
        notes=[details.doubt] if details.doubt is not None else [],
        figures=figures,
        galleries=_galleries(details, answers, samples, found, other),
        tables=shown,
        facts=[Table("Each class", _classes(details, classes))],
        data=tables,
    )
    path.write_text(page.write(built), "utf-8")


def _pairs(details: Details, classes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [("label", "prediction", "images"), *((classes[a], classes[b], f"{n:,}") for a, b, n in details.pairs)]


def _comparison(other: Other) -> list[tuple[str, ...]]:
    counts = other.counts
    rows = [
        ("", "images"),
        ("both right", f"{counts.both:,}"),
        ("only this one right", f"{counts.only_first:,}"),
        ("only the other one right", f"{counts.only_second:,}"),
        ("both wrong", f"{counts.neither:,}"),
    ]
    return [*rows, ("p-value of the difference (McNemar)", counts.shown_p)]


def _classes(details: Details, classes: tuple[str, ...]) -> list[tuple[str, ...]]:
    rows = zip(classes, details.of_classes, strict=True)
    cells = ((name, f"{o.precision:.2%}", f"{o.recall:.2%}", f"{o.f1:.2%}", f"{o.support:,}") for name, o in rows)
    return [("class", "precision", "recall", "F1", "images"), *cells]


# Images -------------------------------------------------------------------------------------------------------------------


_GRADCAM = "Red: regions that support the prediction (Grad-CAM)."
# The title, the caption and the rows of a gallery.
_Chosen = tuple[str, str, Ints]


def _galleries(details: Details, answers: Answers, samples: Samples, found: Trained, other: Other | None) -> list[Gallery]:
    wrong, right = np.flatnonzero(~answers.right), np.flatnonzero(answers.right)
    mistakes = wrong[np.argsort(-details.confidence[wrong], kind="stable")][:_MISTAKES]
    hits = right[np.argsort(details.confidence[right], kind="stable")][:_HITS]
    chosen = [("Most confident mistakes", _GRADCAM, mistakes), ("Least confident hits", _GRADCAM, hits)]
    if other is not None:
        chosen = [*_different(details, answers, other), *chosen]
    for a, b, _ in details.pairs[:_PAIRS]:
        mixed = np.flatnonzero((answers.labels == a) & (answers.predictions == b))[:_OF_PAIR]
        theirs = np.flatnonzero((answers.labels == b) & answers.right)[:_OF_PAIR]
        name = f"{samples.classes[a]}, predicted as {samples.classes[b]}"
        chosen.append((name, f"Then images that are {samples.classes[b]}.", np.concatenate([mixed, theirs])))
    examples = _Examples(details, answers, samples, found, other)
    return [Gallery(title, caption, examples.of(rows)) for title, caption, rows in chosen if len(rows)]


def _different(details: Details, answers: Answers, other: Other) -> list[_Chosen]:
    """The images that only one of the two networks gets right, the largest difference of the label's probability first."""
    theirs = other.predictions == answers.labels
    order = np.argsort(-np.abs(details.label_probability - other.label_probability), kind="stable")
    order = order[other.predictions[order] >= 0]
    only_first, only_second = order[(answers.right & ~theirs)[order]], order[(~answers.right & theirs)[order]]
    return [
        (f"Wrong only in {other.name}", _GRADCAM, only_first[:_DIFFERENT]),
        (f"Right only in {other.name}", _GRADCAM, only_second[:_DIFFERENT]),
    ]


@dataclass(frozen=True)
class _Examples:
    details: Details
    answers: Answers
    samples: Samples
    found: Trained
    other: Other | None

    def of(self, rows: Ints) -> list[Example]:
        """The images of these rows of the answers, with Grad-CAM if the network allows it."""
        numbers = [int(i) for i in self.answers.indices[rows]]
        crop = self.found.crops[-1]
        pixels = np.stack([crop.one(self.samples.image(i), np.ones(crop.draws)) for i in numbers])
        predictions = torch.from_numpy(self.answers.predictions[rows]).to(self.found.precision.device)
        seen = gradcam.maps(self.found.network, self.found.normalise(torch.from_numpy(pixels)), predictions)
        examples = []
        for place, (row, number) in enumerate(zip(rows.tolist(), numbers, strict=True)):
            images: list[Image.Image | None] = [thumbnail(self.samples, number)]
            if seen is not None:
                images.append(gradcam.overlay(pixels[place], seen[place]))
            sources = [data_uri(image) for image in images]
            examples.append(Example(sources, self._text(row), self.samples.name(number)))
        return examples

    def _text(self, row: int) -> str:
        """The label, the prediction, and the other network's prediction if it differs."""
        classes, label, prediction = self.samples.classes, self.answers.labels[row], self.answers.predictions[row]
        text = classes[label] if label == prediction else f"{classes[label]}, predicted {classes[prediction]}"
        text = f"{text} {self.details.confidence[row]:.1%}"
        theirs = prediction if self.other is None else self.other.predictions[row]
        return text if theirs in (prediction, -1) else f"{text}; by the other {classes[theirs]}"
