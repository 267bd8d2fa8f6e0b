"""The splits that a dataset has, and which images belong together."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from worldsize.data.layouts import file_names, label_tables, words
from worldsize.data.layouts.folders import Folders
from worldsize.data.layouts.label_tables import Labels
from worldsize.data.layouts.reading import Hints, Reading, Unclear

_COVERED = 0.9  # of the images: a column of groups must have so many


@dataclass
class Listed:
    """The split of each image, where the data has one, and where it is."""

    splits: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def of_images(labels: dict[str, tuple[str, ...]], places: Folders, families: list[Labels]) -> Listed:
    """The splits of the images in ``labels``: of a column, else of lists, else of the folders.

    Raises:
        Unclear: lists contradict each other.
    """
    found = Listed({image: split for image in labels if (split := places.places[image].split) is not None})
    lists = _lists(labels, families)
    if lists:
        by_list = _by_list(lists)
        if len(set(by_list.values())) == 1 and "train" not in by_list.values():
            by_list |= dict.fromkeys(labels.keys() - by_list.keys() - found.splits.keys(), "train")
        if len({*found.splits.values(), *by_list.values()}) > 1:
            changed = any(found.splits.get(image, split) != split for image, split in by_list.items())
            new = len(by_list.keys() - found.splits.keys())
            found.splits |= by_list
            if changed or new:
                found.notes.append(f"the splits are those of {', '.join(sorted(lists)[:5])}")
    for family in families:
        column = {image: split for image, split in family.splits.items() if image in labels}
        if column:
            if any(found.splits.get(image) != split for image, split in column.items()):
                found.notes.append(f"the splits are those of a column of {family.title}")
            found.splits |= column
    return found


def _lists(labels: dict[str, tuple[str, ...]], families: list[Labels]) -> dict[str, tuple[str, list[str]]]:
    """The files whose names are those of splits: the split, and the images of ``labels`` that they name."""
    found = {}
    for family in families:
        for source, images in family.listed.items():
            split = label_tables.split_of_file(source)
            inside = [image for image in images if image in labels]
            if split is not None and inside:
                found[source] = split, inside
    return found


def _by_list(lists: dict[str, tuple[str, list[str]]]) -> dict[str, str]:
    splits: dict[str, str] = {}
    sources: dict[str, str] = {}
    # trainval.txt is both; where train.txt and val.txt are there too, these decide.
    for source, (split, images) in sorted(lists.items(), key=lambda one: (_is_both(one[0]), one[0])):
        for image in images:
            if splits.setdefault(image, split) != split:
                if _is_both(source) and splits[image] == "val":
                    continue
                raise Unclear(
                    f"{image} is in {sources[image]} and in {source}: pass --ignore with the one that does not count"
                )
            sources.setdefault(image, source)
    return splits


def _is_both(source: str) -> bool:
    return "trainval" in source.lower() or {"train", "val"} <= set(words.words(source))


def settle(reading: Reading) -> None:
    """Decide which splits are used: train and val, else train and test, else none yet."""
    count = Counter(row.split for row in reading.rows)
    if "train" not in count or not ("val" in count or "test" in count):
        reading.rows = [replace(row, split=None) for row in reading.rows]
        return
    if None in count:
        reading.notes.append(f"{count[None]:,} labeled images are in no split and are not used")
        reading.rows = [row for row in reading.rows if row.split is not None]
    if "val" not in count:
        reading.rows = [replace(row, split="val" if row.split == "test" else row.split) for row in reading.rows]
        reading.notes.append("there is no validation split; the test split is used to validate")
    elif "test" in count:
        reading.notes.append(f"the test split ({count['test']:,} images) is not used to train or to validate")
    _leaks(reading)


def _leaks(reading: Reading) -> None:
    sides: dict[str, set[str]] = defaultdict(set)
    for row in reading.rows:
        if row.group is not None and row.split is not None:
            sides[row.group].add(row.split)
    both = sum(len(found) > 1 for found in sides.values())
    if both:
        reading.notes.append(f"{both:,} of {len(sides):,} groups ({reading.group_by}) are in several splits of the data")


def groups(labels: dict[str, tuple[str, ...]], families: list[Labels], hints: Hints) -> tuple[str, dict[str, str]] | None:
    """What belongs together, and the group of each image; None without groups.

    Raises:
        Unclear: there is no column that the hints name.
    """
    if hints.group_by == "none":
        return None
    columns = {name: column for family in families for name, column in family.groups.items()}
    if hints.group_by is not None:
        if hints.group_by not in columns:
            known = ", ".join(columns) or "none"
            raise Unclear(f"--group-by {hints.group_by}: no such column with groups; there are: {known}; or pass none")
        return hints.group_by, columns[hints.group_by]
    usable = {
        name: column
        for name, column in columns.items()
        if len(column.keys() & labels.keys()) >= _COVERED * len(labels) and len(set(column.values())) > 1
    }
    if usable:  # the fewest groups: what is together by patient is also together by lesion
        name = min(usable, key=lambda name: (len(set(usable[name].values())), name))
        return name, usable[name]
    return file_names.groups(labels)
