"""The results of `verify`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from worldsize.config.wording import count, printable
from worldsize.data.progress_bar import size
from worldsize.data.samples import Dataset, Samples
from worldsize.data.survey.verify import TURNED, Found, Place, duplicates

LISTED = 20
_SMALLEST = 5
_REMEDIES = {TURNED: "to apply it, turn the pixels: exiftran -ai FILES (JPEG, lossless), or mogrify -auto-orient FILES"}


def counts(samples: Samples) -> dict[str, int]:
    """Number of images per class."""
    return {name: int(number) for name, number in zip(samples.classes, samples.class_counts(), strict=True)}


def overview(dataset: Dataset) -> Iterator[str]:
    """Lines with the number of classes and images, and of images per class."""
    yield f"{len(dataset.classes):,} classes" + ("; images with several labels" if dataset.multilabel else "")
    for name, samples in (("train", dataset.train), ("val", dataset.val)):
        numbers = counts(samples)
        spread = sorted(numbers.values())
        low, middle, high = spread[0], spread[len(spread) // 2], spread[-1]
        line = f"  {name:<5} {count(len(samples))}; per class {low:,} to {high:,}, median {middle:,}"
        if low < high:
            smallest = sorted(numbers, key=lambda name: (numbers[name], name))[:_SMALLEST]
            line += f"; smallest: {', '.join(f'{printable(label)} ({numbers[label]:,})' for label in smallest)}"
        yield line
    if dataset.validates_on:
        yield f"  validation images: {printable(dataset.validates_on)}"
    yield from (f"warning: {printable(note)}" for note in dataset.notes)


def report(dataset: Dataset, found: dict[str, Found]) -> dict[str, Any]:
    """All results, for a JSON file."""
    groups = duplicates(found)
    return {
        "validates_on": dataset.validates_on,
        "notes": list(dataset.notes),
        "splits": {
            name: {
                "images": len(one.samples),
                "bytes": one.bytes,
                "classes": counts(one.samples),
                "broken": [{"image": one.samples.name(i), "reason": why} for i, why in one.broken.items()],
                "not_read": [str(error) for error in one.unread.values()],
                "odd": {kind: [one.samples.name(i) for i in indices] for kind, indices in sorted(one.odd.items())},
                "fingerprint": one.samples.fingerprint,
                "content": None if one.unread else one.content,
            }
            for name, one in found.items()
        },
        "duplicates": [[_name(found, place) for place in group] for group in groups],
        "in_train_and_val": [[_name(found, place) for place in group] for group in groups if _leaks(group)],
        "with_different_labels": [[_name(found, place) for place in group] for group in groups if _disagree(found, group)],
    }


def summary(dataset: Dataset, found: dict[str, Found]) -> Iterator[str]:
    """Lines with the results, at most `LISTED` images of each kind."""
    yield from overview(dataset)
    yield f"  {size(sum(one.bytes for one in found.values()))} in total"
    broken = [f"{one.samples.name(i)}: {why}" for one in found.values() for i, why in one.broken.items()]
    yield from _listed("broken", broken)
    unread = [str(error) for one in found.values() for error in one.unread.values()]
    yield from _listed("not read, which says nothing about the images", unread)
    for kind in sorted({kind for one in found.values() for kind in one.odd}):
        yield from _listed(f"odd: {kind}", [one.samples.name(i) for one in found.values() for i in one.odd.get(kind, [])])
        if kind in _REMEDIES:
            yield f"  {_REMEDIES[kind]}"
    groups = duplicates(found)
    yield from _groups(
        found, "in both train and val (evaluation results will be too good)", [g for g in groups if _leaks(g)]
    )
    yield from _groups(found, "identical images with different labels", [g for g in groups if _disagree(found, g)])
    rest = [group for group in groups if not _leaks(group) and not _disagree(found, group)]
    yield from _groups(found, "duplicates", rest)
    if not broken and not unread and not groups:
        yield "no broken images, no duplicates"
    for name, one in found.items():
        content = "unknown" if one.unread else one.content[:16]
        yield f"{name:<5} content {content}, names and labels {one.samples.fingerprint[:16]}"


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"{title} ({len(lines):,}):"
        yield from (f"  {printable(line)}" for line in lines[:LISTED])
        if len(lines) > LISTED:
            yield f"  and {len(lines) - LISTED:,} more"


def _groups(found: dict[str, Found], title: str, groups: list[list[Place]]) -> Iterator[str]:
    yield from _listed(title, [" = ".join(_name(found, place) for place in group[:4]) for group in groups])


def _name(found: dict[str, Found], place: Place) -> str:
    return found[place[0]].samples.name(place[1])


def _leaks(group: list[Place]) -> bool:
    return len({split for split, _ in group}) > 1


def _disagree(found: dict[str, Found], group: list[Place]) -> bool:
    return len({found[split].samples.label_names(index) for split, index in group}) > 1
