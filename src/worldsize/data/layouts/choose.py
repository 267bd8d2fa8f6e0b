"""Choose between the forms of evidence, and put the reading together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from worldsize.data.confusable_names import look_alikes
from worldsize.data.layouts import (
    evidence,
    file_names,
    folders,
    inventory,
    label_tables,
    maps,
    refusals,
    shared_images,
    sidecars,
    splits,
    tables,
)
from worldsize.data.layouts.columns import is_renaming
from worldsize.data.layouts.evidence import Evidence
from worldsize.data.layouts.folders import Folders
from worldsize.data.layouts.inventory import Inventory
from worldsize.data.layouts.label_tables import Labels
from worldsize.data.layouts.reading import Hints, Reading, Row, Unclear
from worldsize.data.layouts.resolve import Finder
from worldsize.data.layouts.tables import Table

_LISTED = 5
_FOLDERS = "the names of the folders"


@dataclass
class _Seen:
    """Everything that was seen in a folder."""

    inventory: Inventory
    folders: Folders
    tables: list[Table]
    families: list[Labels]
    names: dict[str, str]


def read(root: Path, hints: Hints | None = None) -> Reading:
    """Read the folder ``root``.

    Raises:
        Unclear: it has no images or labels, or they can be read in several ways.
        UserError: it cannot be listed, or a hint names something that is not there.
    """
    hints = hints or Hints()
    seen = _look(root, hints)
    found = _choose(seen, hints)
    refusals.require_distinct(found.source, found.ambiguous, found.labels)
    if found.source == _FOLDERS:
        found = shared_images.settle(found, seen.folders, root, hints)
    several = _kind(found, hints)
    listed = splits.of_images(found.labels, seen.folders, seen.families)
    missing = refusals.not_there(found.missing, seen.inventory)
    reading = Reading(several, [], [], seen.inventory.ignored, missing, found.source)
    reading.unused = refusals.not_decoded(seen.inventory)
    reading.notes += [*_left_out(seen), *found.notes, *seen.folders.notes]
    groups = splits.groups(found.labels, seen.families, hints)
    reading.group_by = groups[0] if groups else None
    for image in sorted(found.labels):
        group = groups[1].get(image) if groups else None
        reading.rows.append(Row(image, found.labels[image], listed.splits.get(image), group))
    reading.notes += listed.notes
    splits.settle(reading)
    used = {row.file for row in reading.rows}
    reading.unlabelled = [image for image in seen.inventory.images if image not in used]
    _check(reading)
    return reading


def _look(root: Path, hints: Hints) -> _Seen:
    found = inventory.take(root, hints.ignore)
    if not found.images:
        raise Unclear(refusals.no_images(found))
    places = folders.read(found.images, hints.level)
    finder = Finder(found.images, {image: place.split for image, place in places.places.items()})
    stems = {inventory.stem(image) for image in found.images}
    beside = [other for other in found.others if inventory.stem(other) in stems and refusals.is_beside(other)]
    sources = sorted(set(found.others) - set(beside))
    read_tables = [table for source in sources if (table := tables.read(root, source, finder.certainty)) is not None]
    read_tables = label_tables.with_numbers(read_tables) + sidecars.tables(root, beside, finder)
    families = label_tables.gather(read_tables, finder, hints.column)
    # Images to predict often have other names.
    candidates = [image for image in found.images if places.places[image].split != "test"]
    names = file_names.classes(candidates) or file_names.classes(found.images)
    return _Seen(found, places, read_tables, families, names)


def _choose(seen: _Seen, hints: Hints) -> Evidence:
    """The labels to believe."""
    by_name = Evidence({image: _single(name) for image, name in seen.names.items()}, False, "the names of the files")
    if hints.labels == "folders" or hints.level is not None:
        return _of_folders(seen)
    if hints.labels == "names":
        return by_name
    table = evidence.from_tables(seen.families, hints)
    if hints.labels is not None and table is not None:
        return _renamed(table, seen)
    if hints.column is not None and table is None:
        raise Unclear(f"--label-column {hints.column}: no table that names images has this column")
    if table is not None:
        return _with_folders(table, seen)
    unclear = [one for one in seen.families if one.candidates]
    if seen.folders.labels and seen.folders.strength != "parts":
        if not _confirmed(unclear, seen.folders.labels):
            if seen.folders.unclear is not None:
                raise Unclear(seen.folders.unclear)
            if unclear and seen.folders.strength == "numbers":
                raise Unclear(_which_column(unclear[0]))
        return _of_folders(seen)
    if unclear and not _confirmed(unclear, seen.names):
        raise Unclear(_which_column(unclear[0]))
    if seen.names:
        return by_name
    raise Unclear(refusals.no_labels(seen.inventory, seen.folders, seen.families))


def _of_folders(seen: _Seen) -> Evidence:
    labels = {image: _single(label) for image, label in seen.folders.labels.items()}
    if not labels:
        raise Unclear(refusals.no_labels(seen.inventory, seen.folders, seen.families))
    folders.require_same_classes(seen.folders)
    return Evidence(labels, False, _FOLDERS)


def _single(label: str) -> tuple[str, ...]:
    return (label,)


def _confirmed(families: list[Labels], labels: dict[str, str]) -> bool:
    """Whether a column that may have the labels says the same as ``labels``, possibly with other names."""
    columns = [column for one in families for column in one.candidates.values()]
    return any(_agree(column, labels) for column in columns)


def _agree(column: dict[str, tuple[str, ...]], labels: dict[str, str]) -> bool:
    pairs = {(labels[image], found) for image, found in column.items() if image in labels}
    return len(pairs) > 1 and is_renaming(pairs)


def _with_folders(table: Evidence, seen: _Seen) -> Evidence:
    """The labels of the tables, with those of the folders where both agree or are about different images."""
    inside = seen.folders.labels
    both = table.labels.keys() & inside.keys()
    if both and not table.several:
        pairs = {(table.labels[image][0], inside[image]) for image in both}
        if is_renaming(pairs):
            names = dict(pairs)
            labels = {image: _single(names.get(label[0], label[0])) for image, label in table.labels.items()}
            labels |= {image: _single(label) for image, label in inside.items()}
            return replace(table, labels=labels, several=False, source=_joined(table, labels, inside))
    if not inside or seen.folders.strength == "parts":
        return _renamed(table, seen)
    if not both:
        classes = set(inside.values())
        if not table.several and {label for one in table.labels.values() for label in one} <= classes:
            labels = table.labels | {image: _single(label) for image, label in inside.items()}
            return replace(table, labels=labels, several=False, source=_joined(table, labels, inside))
    elif seen.folders.strength == "numbers":
        return _renamed(table, seen)
    if table.weak or evidence.is_small(len(table.labels), len(inside)):
        found = _of_folders(seen)
        why = "its name is not that of labels" if table.weak else f"it is about {len(table.labels)} images only"
        found.notes.append(f"{table.source} is not used: {why}")
        return found
    image = min(both or table.labels)
    said = " and ".join(map(repr, table.labels[image]))
    raise Unclear(
        f"the names of the folders and {table.source} are different labels; {image} is {said} in the table. "
        "Pass --labels folders, or --labels FILE for the table"
    )


def _joined(table: Evidence, labels: dict[str, tuple[str, ...]], inside: dict[str, str]) -> str:
    """Where the labels are, if folders and tables have them."""
    only = len(labels) - len(inside)
    return "the names of the folders" + (f", and for {only} images {table.source}" if only else f" (as in {table.source})")


def _renamed(table: Evidence, seen: _Seen) -> Evidence:
    """The labels with the names of the classes, where a file names them."""
    labels = {label for one in table.labels.values() for label in one}
    found = maps.names(labels, seen.inventory.root, seen.inventory.others, seen.tables)
    if found is None:
        return table
    note, names = found
    renamed = {image: tuple(names.get(label, label) for label in one) for image, one in table.labels.items()}
    return replace(table, labels=renamed, notes=[*table.notes, note])


def _which_column(table: Labels) -> str:
    columns = list(table.candidates)
    return (
        f"{table.title} has {len(columns)} columns that may have the labels ({', '.join(columns[:_LISTED])}): pass --labels "
        f"{table.sources[0]!r} --label-column {columns[0]!r}, or another of them"
    )


def _kind(found: Evidence, hints: Hints) -> bool:
    if hints.kind == "multi":
        return True
    odd = [image for image, labels in found.labels.items() if len(labels) != 1]
    if hints.kind == "single" and odd:
        raise Unclear(f"--kind single: {len(odd)} images have several labels or none, the first is {min(odd)}")
    return found.several and hints.kind is None


def _left_out(seen: _Seen) -> list[str]:
    """Sentences about what is not used."""
    notes = []
    reasons = Counter(reason.split(" of ")[0] for reason in seen.inventory.ignored.values())
    for reason, count in sorted(reasons.items()):
        example = min(image for image, why in seen.inventory.ignored.items() if why.startswith(reason))
        verb = "image is" if count == 1 else "images are"
        notes.append(f"{count:,} {verb} left out ({reason}), such as {example}")
    notes += [f"{source} is a template for submissions, no labels" for source in _templates(seen)]
    if seen.inventory.empty and seen.folders.labels:
        named = ", ".join(seen.inventory.empty[:_LISTED]) + (" and more" if len(seen.inventory.empty) > _LISTED else "")
        notes.append(f"folders without readable images are no classes: {named}")
    notes += refusals.unread(seen.inventory)
    return notes


def _templates(seen: _Seen) -> list[str]:
    return [table.source for table in seen.tables if tables.is_template(table.source)]


def _check(reading: Reading) -> None:
    classes = reading.classes
    if len(classes) < 2:
        only = f"only the class {classes[0]!r}" if classes else "no labels"
        raise Unclear(f"the folder has {only} ({reading.source}): training a classifier requires at least two")
    train = {label for row in reading.rows if row.split in (None, "train") for label in row.labels}
    for split in ("val", "test"):
        new = {label for row in reading.rows if row.split == split for label in row.labels} - train
        if new:
            raise Unclear(
                f"{split} has labels that train does not have: {', '.join(sorted(new)[:_LISTED])}"
                f"{look_alikes(sorted(new), train)}. Rename them, or leave their images out with --ignore"
            )
