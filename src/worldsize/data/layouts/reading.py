"""What a layout is read as: the images with their labels, splits and groups, and what was left out and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from worldsize.data.unused_files import Unused
from worldsize.errors import UserError

Kind = Literal["single", "multi"]
# Of an image, in the order in which they are preferred to validate with: train, val, test.
SPLITS = ("train", "val", "test")


class Unclear(UserError):
    """A folder that cannot be read, or can be read in several ways. The message names the flag that decides."""


@dataclass(frozen=True)
class Hints:
    """The user's decisions; None: decide by the evidence.

    Attributes:
        labels: ``folders``, ``names`` (of the files), or the path of a table relative to the folder.
        column: the column of the table with the labels.
        kind: whether an image has one label or several.
        level: which folders are the classes, 1 for the outermost that the images do not share.
        group_by: the column whose equal values stay in one split, or ``none``.
        ignore: folders and files that do not belong to the dataset, relative to the folder.
    """

    labels: str | None = None
    column: str | None = None
    kind: Kind | None = None
    level: int | None = None
    group_by: str | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A labeled image: its path, its labels, its split (None: not decided) and its group (None: alone)."""

    file: str
    labels: tuple[str, ...]
    split: str | None = None
    group: str | None = None


@dataclass
class Reading:
    """A folder of images, read.

    Attributes:
        several: whether an image may have several labels, or none.
        rows: the labeled images, sorted by path.
        unlabelled: the other images.
        ignored: images that do not belong to the dataset, such as copies and masks, and why.
        missing: what tables call images that are not in the folder.
        source: where the labels are, such as ``the names of the folders``.
        unused: images of formats that are not decoded here.
        group_by: what the groups are; None without groups.
        notes: sentences about what was read, left out and why.
    """

    several: bool
    rows: list[Row]
    unlabelled: list[str]
    ignored: dict[str, str]
    missing: list[str]
    source: str
    unused: Unused = field(default_factory=Unused)
    group_by: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        """The labels, sorted."""
        return sorted({label for row in self.rows for label in row.labels})

    @property
    def split(self) -> bool:
        """Whether the data has its own training and validation splits."""
        return any(row.split == "val" for row in self.rows)
