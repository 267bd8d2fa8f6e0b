"""What the columns of a table mean: its labels, splits and groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from worldsize.data.layouts import cells, words
from worldsize.data.layouts.inventory import stem
from worldsize.data.layouts.tables import Cell, Table

_FLOAT = re.compile(r"-?\d*\.\d*[1-9]\d*(e-?\d+)?")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_TRUE, _FALSE = frozenset(("1", "1.0", "true", "yes")), frozenset(("0", "0.0", "-1", "-1.0", "false", "no"))
_ZERO, _MINUS, _UNCERTAIN = frozenset(("0", "0.0")), frozenset(("-1", "-1.0")), frozenset(("", "u", "0.5"))
_BOX_NUMBERS = 4
_MOST_NUMBERS = 20  # different numbers in a column without a telling name that may be classes; more are measurements
_OWN_HEADER = ("image", "labels")  # of the tables that data.name multilabel reads: an empty cell has no label


@dataclass
class Roles:
    """The columns of a table by their meaning.

    Attributes:
        labels: the labels of each row (None: not labeled), in the order of the rows; None: this table has none, or it is
            unclear which.
        column: what the labels are called, for messages.
        several: whether a row may have several labels, or none.
        candidates: if it is unclear, the columns that the labels may be in.
        negative: rows that say that a label is absent.
        splits: the split of each row, None where it has none; None without such a column.
        groups: the columns that say what belongs together, by name.
        boxed: whether the labels are those of boxes within images.
        weak: whether the labels are those of a column whose name does not say so.
    """

    labels: list[cells.ImageLabels] | None = None
    column: str = ""
    several: bool = False
    candidates: list[str] = field(default_factory=list)
    negative: list[bool] | None = None
    splits: list[str | None] | None = None
    groups: dict[str, list[str]] = field(default_factory=dict)
    boxed: bool = False
    weak: bool = False


def roles(
    table: Table, chosen: str | None = None, numbers: frozenset[int] = frozenset(), like: Sequence[Table] = ()
) -> Roles:
    """Find the meaning of a table's columns.

    Args:
        table: its rows name images.
        chosen: the column with the labels; None: decide.
        numbers: columns that only number the rows.
        like: other tables, which may have the same column of labels.
    """
    columns = {i: list(table.column(i)) for i in range(len(table.columns)) if i != table.file and i not in numbers}
    found = Roles()
    named = set[str]().union(*(words.words(table.columns[i]) for i in columns))
    rows = [str(cell) for cell in table.column(table.file or 0)]
    # A box in each image, such as that of the traffic sign, does not make a table of boxes; several do.
    found.boxed = bool(named & words.BOXES) or (bool(named & words.BOX) and len(set(rows)) < len(rows))
    for i, column in list(columns.items()):
        splits = _splits(table.columns[i], column) if table.headed else _unnamed_splits(stem(table.source), column)
        if splits is not None and table.columns[i] != chosen:
            found.splits = splits
            del columns[i]
        elif table.headed and _is_group(table.columns[i], column):
            found.groups[table.columns[i]] = [str(cell) for cell in column]
        elif set(words.words(table.columns[i])) <= words.PRESENCE and set(map(str, column)) == {"0", "1"}:
            found.negative = [cell == "0" for cell in column]
            del columns[i]
    if chosen is not None:
        matches = [i for i in columns if table.columns[i] == chosen]
    else:
        matches = _label_columns(table, columns, set(found.groups))
        if not matches and (block := _one_hot(table, columns, set(found.groups))):
            found.labels = block
            found.several = any(one is None or len(one) != 1 for one in block)
            found.column = "one column per label"
            return found
        block_columns = [] if matches or not table.headed else _binary(table, columns, set(found.groups))
        if len(block_columns) > 1:  # some values are uncertain
            matches = block_columns
    if len(matches) == 1:
        found.column = table.columns[matches[0]]
        found.labels, found.several = cells.labels(columns[matches[0]], _same_column(found.column, table, like))
        if found.several and table.columns[:2] == _OWN_HEADER:
            found.labels = [one or () for one in found.labels]
        found.groups.pop(found.column, None)
    found.candidates = [table.columns[i] for i in matches]
    found.weak = table.headed and len(matches) == 1 and chosen is None and score(found.column) == 0
    return found


def _same_column(name: str, table: Table, like: Sequence[Table]) -> list[str]:
    """The cells of other tables in the column ``name``."""
    if not table.headed:
        return []
    others = (other for other in like if name in other.columns and other.file is not None and other.source != table.source)
    return [
        str(cell) for other in others for cell in other.column(other.columns.index(name)) if cell and isinstance(cell, str)
    ]


def _splits(name: str, column: Sequence[Cell]) -> list[str | None] | None:
    """The splits in a column such as ``split`` or ``is_valid``; None if it has others."""
    parts = set(words.words(name))
    if not parts & words.SPLIT_COLUMN:
        return None
    values = {str(cell).lower() for cell in column} - {""}
    if values and values <= _TRUE | _FALSE:
        yes = words.split_of(name)
        if yes is None or ("is" not in parts and len(parts) > 1):
            return None
        no = "val" if yes == "train" else "train"
        return [None if not cell else yes if str(cell).lower() in _TRUE else no for cell in column]
    known = {value: words.split_of(value) for value in values}
    if not values or None in known.values():
        return _numbered_splits(name, column)
    return [known.get(str(cell).lower()) for cell in column]


def _unnamed_splits(source: str, column: Sequence[Cell]) -> list[str | None] | None:
    """The splits in a column without a name: train and val as words, or numbers if the file is called so."""
    values = {str(cell) for cell in column}
    if len(values) > 1 and all(words.is_only_split(value) for value in values):
        return [words.split_of(str(cell)) for cell in column]
    return _numbered_splits(source, column)


def _numbered_splits(name: str, column: Sequence[Cell]) -> list[str | None] | None:
    """The splits in `partition` (0, 1 and 2 are train, val and test) and `train_test_split` (1 is train)."""
    parts, values = set(words.words(name)), {str(cell) for cell in column}
    if parts & words.TRAIN and parts & words.TEST and values == {"0", "1"}:
        return ["train" if cell == "1" else "test" for cell in column]
    if "partition" in parts and {"0", "1"} <= values <= {"0", "1", "2"}:
        return [{"0": "train", "1": "val", "2": "test"}[str(cell)] for cell in column]
    return None


def _is_group(name: str, column: Sequence[Cell]) -> bool:
    parts = set(words.words(name))
    if not parts & words.GROUP or parts & (words.ABOUT - {"id"}) or parts & words.LABEL:
        return False
    values = {str(cell) for cell in column}
    return 1 < len(values) < len(column)


def score(name: str) -> int:
    """How much a name is that of a label column: 3, 2, or 0."""
    parts = words.words(name)
    strong = [part for part in parts if part in words.LABEL]
    weak = [part for part in parts if part in words.LABEL_WEAK]
    if strong and all(part in words.LABEL | words.LABEL_FILLER for part in parts):
        return 3
    if set(parts) & words.BOX:
        return 0
    if strong:
        return 2
    return 2 if weak and all(part in words.LABEL_WEAK | words.LABEL_FILLER for part in parts) else 0


def _label_columns(table: Table, columns: dict[int, list[Cell]], groups: set[str]) -> list[int]:
    """The columns that may have the labels: one if it is clear."""
    usable = [i for i in columns if table.columns[i] not in groups and _usable(columns[i], score(table.columns[i]))]
    if table.headed:
        for least in (3, 2):
            named = [i for i in usable if score(table.columns[i]) >= least]
            if named:
                return _one_of_equals(named, columns)
        return _unnamed(table, columns, usable)
    texts = [i for i in usable if not _numeric(columns[i])]
    if texts:
        return texts
    return usable if len(usable) < _BOX_NUMBERS else []


def _unnamed(table: Table, columns: dict[int, list[Cell]], usable: list[int]) -> list[int]:
    """Of columns without a telling name, those whose values look like labels."""
    rest = [i for i in usable if not set(words.words(table.columns[i])) & words.ABOUT]
    rest = [i for i in rest if _repeats(columns[i])]
    rest = [i for i in rest if not _numeric(columns[i]) or len(set(columns[i])) <= _MOST_NUMBERS]
    block = _binary(table, columns, set())
    if len(block) > 1:  # a column for each label; unless other columns may have the labels
        other = [i for i in rest if i not in block]
        return [*other, *block] if other else []
    return _one_of_equals(rest, columns)


def _repeats(column: Sequence[Cell]) -> bool:
    """Whether labels are those of two images on average. Captions and names are not."""
    parts, _ = cells.labels(column)
    return len({label for one in parts for label in one or ()}) * 2 <= len(parts)


def _usable(column: Sequence[Cell], named: int) -> bool:
    """Whether the values may be labels. A column that is called label may have a single one, of a part of the dataset."""
    values = [cell for cell in column if cell]
    different = set(values)
    if any(isinstance(cell, str) and _FLOAT.fullmatch(cell) for cell in different):
        return False
    if named:
        return bool(different)
    if any(isinstance(cell, tuple) for cell in different):
        return True
    return 1 < len(different) < max(3, len(values))


def _numeric(column: Sequence[Cell]) -> bool:
    return all(isinstance(cell, str) and _NUMBER.fullmatch(cell) for cell in column if cell)


def _one_of_equals(found: list[int], columns: dict[int, list[Cell]]) -> list[int]:
    """Of columns that say the same, such as class_id and class_name, the one with names."""
    if len(found) < 2:
        return found
    first = columns[found[0]]
    if all(is_renaming(zip(first, columns[i], strict=True)) for i in found[1:]):
        return sorted(found, key=lambda i: (_numeric(columns[i]), -len(set(columns[i])), i))[:1]
    return found


def is_renaming(pairs: Iterable[tuple[object, object]]) -> bool:
    """Whether the pairs are a one-to-one relation."""
    different = set(pairs)
    return len({one for one, _ in different}) == len(different) == len({other for _, other in different})


def _binary(table: Table, columns: dict[int, list[Cell]], groups: set[str]) -> list[int]:
    """The columns whose values say yes or no, or that this is uncertain."""
    allowed = _TRUE | _FALSE | _UNCERTAIN
    return [
        i
        for i, column in columns.items()
        if table.columns[i] not in groups and not set(words.words(table.columns[i])) & words.ABOUT
        if {str(cell).lower() for cell in column} <= allowed and set(map(str, column)) != {""}
    ]


def _is_uncertain(column: Sequence[Cell]) -> bool:
    """Whether some values are neither yes nor no. -1 next to 0 means uncertain, without 0 it means no."""
    values = {str(cell).lower() for cell in column}
    return bool(values & _UNCERTAIN) or bool(values & _MINUS and values & _ZERO)


def _one_hot(table: Table, columns: dict[int, list[Cell]], groups: set[str]) -> list[cells.ImageLabels] | None:
    """The labels of a table with a column of zeros and ones for each."""
    if not table.headed:
        return None
    block = _binary(table, columns, groups)
    if len(block) < 2 or any(_is_uncertain(columns[i]) for i in block):
        return None
    rows = zip(*(columns[i] for i in block), strict=True)
    names = [table.columns[i] for i in block]
    return [tuple(n for n, cell in zip(names, row, strict=True) if str(cell).lower() in _TRUE) for row in rows]
