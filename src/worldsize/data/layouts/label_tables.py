"""The labels of all tables of a folder, by image."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from worldsize.data.layouts import cells, columns, words
from worldsize.data.layouts.inventory import stem
from worldsize.data.layouts.resolve import Finder
from worldsize.data.layouts.tables import Cell, Table, is_template


@dataclass
class Labels:
    """What the tables with the same columns say.

    Attributes:
        sources: their files.
        column: the column of the labels.
        labels: by image; None if the tables have none, or it is unclear which.
        several: whether an image may have several labels, or none.
        candidates: by column, the labels that it would give; if it is unclear which.
        splits: by image.
        groups: by column and image.
        listed: all images that the tables name, by file.
        missing: what they call images that are not there.
        ambiguous: the images that a name may mean, if there are several.
        no_label: the label that means that there is none.
        boxed: whether the labels are those of boxes within images.
        disagree: images with several labels where others have one.
        weak: whether the name of the column does not say that it has the labels.
    """

    sources: list[str]
    column: str = ""
    labels: dict[str, tuple[str, ...]] | None = None
    several: bool = False
    candidates: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    splits: dict[str, str] = field(default_factory=dict)
    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    listed: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    ambiguous: dict[str, list[str]] = field(default_factory=dict)
    no_label: str | None = None
    boxed: bool = False
    disagree: list[str] = field(default_factory=list)
    weak: bool = False

    @property
    def images(self) -> set[str]:
        """All images that the tables name."""
        return set[str]().union(*self.listed.values())

    @property
    def title(self) -> str:
        """The files, for messages."""
        return self.sources[0] if len(self.sources) == 1 else f"{self.sources[0]} and {len(self.sources) - 1} more"


def gather(tables: Iterable[Table], finder: Finder, column: str | None) -> list[Labels]:
    """The labels of tables that name images, a `Labels` for each set of equal column names; the largest first.

    Args:
        tables: all tables of the folder.
        finder: finds their images.
        column: the column with the labels; None: decide.
    """
    families: dict[tuple[object, ...], list[Table]] = defaultdict(list)
    naming = [table for table in tables if table.file is not None and not is_template(table.source)]
    for table in naming:
        extension = posixpath.splitext(table.source)[1].lower()
        same = (table.columns,) if table.headed else (len(table.columns), extension, *_topic(table.source))
        families[same].append(table)
    found = [_read(family, finder, column, naming) for family in families.values()]
    return sorted((one for one in found if one.images), key=lambda one: (-len(one.images), one.sources))


def _topic(source: str) -> tuple[str, ...]:
    """What a list is about: images_variant_train.txt and images_variant_test.txt are about the same."""
    ignored = words.TRAIN | words.VAL | words.TEST | {"trainval"}
    return tuple(word for word in words.without_numbers(stem(source)) if word not in ignored)


def _read(family: list[Table], finder: Finder, column: str | None, naming: list[Table]) -> Labels:
    """Read tables with the same columns as one."""
    first = family[0]
    assert first.file is not None
    found = Labels([table.source for table in family])
    rows: list[tuple[Cell, ...]] = []
    images: list[str | None] = []
    for table in family:
        named = [(name, row) for row in table.rows if isinstance(name := _name(row, table), str) and name]
        followed = finder.followed((name for name, _ in named), table.source)
        for name, row in named:
            rows.append(row)
            means = finder.candidates(name, table.source, followed)
            images.append(means[0] if len(means) == 1 else None)
            if len(means) == 1:
                found.listed.setdefault(table.source, []).append(means[0])
            elif means:
                found.ambiguous[name] = means
            else:
                found.missing.append(name)
    found.missing = list(dict.fromkeys(found.missing))
    table = Table(first.source, first.columns, rows, first.headed, first.file)
    roles = columns.roles(table, column if column in first.columns else None, _row_numbers(family), naming)
    found.column, found.boxed, found.weak = roles.column, roles.boxed, roles.weak
    _add_splits_and_groups(found, images, roles)
    if roles.labels is not None:
        _add_labels(found, images, roles)
    elif len(roles.candidates) > 1:
        for name in roles.candidates:
            one, _ = cells.labels(table.column(first.columns.index(name)))
            pairs = zip(images, one, strict=True)
            found.candidates[name] = {image: label for image, label in pairs if image is not None and label is not None}
    return found


def _name(row: tuple[Cell, ...], table: Table) -> Cell:
    """What the row calls its image."""
    return row[table.file] if table.file is not None and table.file < len(row) else ""


def _row_numbers(family: list[Table]) -> frozenset[int]:
    """Columns without a name that have another number in each row of each file."""
    if family[0].headed:
        return frozenset()
    found = range(len(family[0].columns))
    return frozenset(i for i in found if all(_counts(list(table.column(i))) for table in family))


def with_numbers(tables: list[Table]) -> list[Table]:
    """The tables, and those that call images by the numbers that another one gives them: ``1 a.jpg`` and ``1 cat``."""
    found = list(tables)
    for numbered in tables:
        if numbered.headed or numbered.file != 1 or len(numbered.columns) != 2:
            continue
        files = {row[0]: row[1] for row in numbered.rows if len(row) == 2}
        if not _counts(list(numbered.column(0))):
            continue
        for other in tables:
            if other.file is None and {row[0] for row in other.rows} == files.keys():
                rows: list[tuple[Cell, ...]] = [(files[row[0]], *row[1:]) for row in other.rows]
                found.append(Table(other.source, other.columns, rows, headed=False, file=0))
    return found


def _counts(column: list[Cell]) -> bool:
    return len(set(column)) == len(column) and all(isinstance(cell, str) and cell.isdecimal() for cell in column)


def _add_splits_and_groups(found: Labels, images: list[str | None], roles: columns.Roles) -> None:
    for image, split in zip(images, roles.splits or (), strict=False):
        if image is not None and split is not None:
            found.splits[image] = split
    for name, values in roles.groups.items():
        found.groups[name] = {
            image: value for image, value in zip(images, values, strict=True) if image is not None and value
        }


def _add_labels(found: Labels, images: list[str | None], roles: columns.Roles) -> None:
    assert roles.labels is not None
    parts, found.several = roles.labels, roles.several
    if found.several:
        parts, found.no_label = cells.without_none(parts)
    joined: dict[str, list[str]] = {}
    repeated: set[str] = set()
    for i, (image, labels) in enumerate(zip(images, parts, strict=True)):
        if image is None or labels is None:
            continue
        if image in joined and not found.several:
            repeated.add(image)
        absent = roles.negative is not None and roles.negative[i]
        joined.setdefault(image, []).extend(label for label in labels if not absent and label not in joined[image])
    found.labels = {image: tuple(labels) for image, labels in joined.items()}
    found.disagree = [image for image in repeated if len(found.labels[image]) > 1]
    if roles.negative is not None and any(len(labels) != 1 for labels in found.labels.values()):
        found.several = True


def split_of_file(source: str) -> str | None:
    """The split that the name of a list or its folder says."""
    return words.split_of(posixpath.splitext(posixpath.basename(source))[0]) or words.split_of(
        posixpath.basename(posixpath.dirname(source))
    )
