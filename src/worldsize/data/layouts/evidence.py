"""Which of the labels in tables to believe: those of most images, completed by others that agree with them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from worldsize.data.layouts.inventory import stem
from worldsize.data.layouts.label_tables import Labels
from worldsize.data.layouts.reading import Hints, Unclear

_SMALL = 0.1  # of the images: a table about fewer does not outweigh another form of evidence
_CONFLICTS = 0.05  # of the images: fewer with several labels are probably mistakes


@dataclass
class Evidence:
    """Labels of images, where they are, and what was not believed."""

    labels: dict[str, tuple[str, ...]]
    several: bool
    source: str
    missing: list[str] = field(default_factory=list)
    weak: bool = False
    notes: list[str] = field(default_factory=list)
    ambiguous: dict[str, list[str]] = field(default_factory=dict)  # images that a name may mean, if there are several


def from_tables(families: list[Labels], hints: Hints) -> Evidence | None:
    """The labels of all tables together; None if no table has labels.

    Raises:
        Unclear: two tables contradict each other.
    """
    usable = [one for one in families if one.labels and not one.boxed]
    if hints.labels not in (None, "folders", "names"):
        usable = _named(families, str(hints.labels), hints.column)
    usable = _yes_or_no(usable)
    if not usable:
        return None
    first, *others = sorted(usable, key=lambda one: -len(one.labels or ()))
    found = _one(first, hints)
    for other in others:
        _join(found, first, other, hints)
    return found


def _yes_or_no(usable: list[Labels]) -> list[Labels]:
    """Lists such as cat_train.txt and dog_val.txt, in which 1 means that the image has the label, as one with all labels."""
    lists = [one for one in usable if set[str]().union(*(one.labels or {}).values()) <= {"1", "0", "-1"} and not one.several]
    lists = [one for one in lists if one.column.startswith("column ") and _label(one)]
    if len(lists) < 2:
        return usable
    images = set[str]().union(*(one.labels or () for one in lists))
    labels = {image: tuple(_label(one) for one in lists if (one.labels or {}).get(image) == ("1",)) for image in images}
    sources = [source for one in lists for source in one.sources]
    joined = Labels(sources, "1", labels, several=True, missing=sorted(set[str]().union(*(one.missing for one in lists))))
    for one in lists:
        joined.ambiguous |= one.ambiguous
    return [joined, *(one for one in usable if one not in lists)]


def _label(table: Labels) -> str:
    """The label that the name of a list contains, such as cat in cat_train.txt."""
    return re.sub(r"[ _-]?(trainval|train|val|test)$", "", stem(table.sources[0]))


def _named(families: list[Labels], source: str, column: str | None) -> list[Labels]:
    """The table that --labels names."""
    matches = [one for one in families if source in one.sources]
    if not matches:
        known = ", ".join(source for one in families for source in one.sources[:3]) or "none"
        raise Unclear(f"--labels {source}: no such table that names images of the folder; there are: {known}")
    [one] = matches
    if not one.labels:
        columns = ", ".join(one.candidates) or "none"
        flag = f"--label-column {column}: no such column" if column else "pass --label-column NAME"
        raise Unclear(f"{source}: {flag}; columns that may have the labels: {columns}")
    return matches


def _one(table: Labels, hints: Hints) -> Evidence:
    assert table.labels is not None
    several, share = table.several, len(table.disagree) / len(table.labels)
    if table.disagree and not several:
        if share < _CONFLICTS and hints.kind != "multi":
            raise Unclear(
                f"{table.title} gives {len(table.disagree)} images two labels, the first is {table.disagree[0]}: correct "
                "it, or pass --kind multi if an image may have several labels"
            )
        several = True
    source = f"the column {table.column!r} of {table.title}"
    found = Evidence(dict(table.labels), several, source, list(table.missing), table.weak, ambiguous=dict(table.ambiguous))
    if table.no_label is not None:
        found.notes.append(f"{table.no_label!r} in {table.title} is read as no label")
    return found


def _join(found: Evidence, first: Labels, other: Labels, hints: Hints) -> None:
    """Add the labels of another table, if it is about other images and has the same labels."""
    assert other.labels is not None
    both = found.labels.keys() & other.labels.keys()
    different = [image for image in both if set(found.labels[image]) != set(other.labels[image])]
    known = {label for labels in found.labels.values() for label in labels}
    new = {label for labels in other.labels.values() for label in labels} - known
    if different and len(other.labels) >= _SMALL * len(found.labels) and not _renames(found, other, both):
        example = sorted(different)[0]
        raise Unclear(
            f"{first.title} and {other.title} contradict each other: {example} is {_text(found.labels[example])} in "
            f"one and {_text(other.labels[example])} in the other. Pass --labels {first.sources[0]} or --labels "
            f"{other.sources[0]}"
        )
    if different or len(new) * 2 > len(known):
        found.notes.append(f"the labels in {other.title} (column {other.column!r}) are not used")
        return
    found.labels |= {image: labels for image, labels in other.labels.items() if image not in found.labels}
    found.several |= other.several
    if not both:
        found.source += f" and {other.title}"
        found.missing += other.missing
        found.ambiguous |= other.ambiguous


def _renames(found: Evidence, other: Labels, both: set[str]) -> bool:
    """Whether the other table has other names for the same labels."""
    assert other.labels is not None
    pairs = {(found.labels[image], other.labels[image]) for image in both}
    return len({one for one, _ in pairs}) == len(pairs) == len({two for _, two in pairs})


def _text(labels: tuple[str, ...]) -> str:
    return " and ".join(map(repr, labels)) or "without a label"


def is_small(part: int, whole: int) -> bool:
    """Whether evidence about ``part`` images does not outweigh evidence about ``whole`` images."""
    return part < _SMALL * whole
