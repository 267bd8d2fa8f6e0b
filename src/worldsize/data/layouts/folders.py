"""Labels and splits from the names of folders, at any depth."""

from __future__ import annotations

import calendar
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from worldsize.data.confusable_names import look_alikes
from worldsize.data.layouts import words
from worldsize.data.layouts.reading import Unclear

# How much a set of folder names looks like classes: names, names that differ in a number only, or parts without a meaning.
Strength = Literal["names", "numbers", "parts"]
_WEAKER: tuple[Strength, ...] = ("names", "numbers", "parts")
_CAMERA_FOLDER = re.compile(r"\d{3}[A-Z0-9_]{5}")
_DATE = re.compile(r"(19|20)\d\d([-_. ]?(0[1-9]|1[0-2])([-_. ]?[0-3]\d)?)?|(0[1-9]|1[0-2])")
_MONTHS = frozenset(month.lower() for month in calendar.month_name if month)


@dataclass(frozen=True)
class Place:
    """What the folders of an image say: its split and its class."""

    split: str | None = None
    label: str | None = None


@dataclass
class Folders:
    """The places of all images.

    Attributes:
        places: by path.
        strength: how much the names look like classes; None without classes.
        unclear: why the classes cannot be decided; None if they can.
        notes: what else was seen.
    """

    places: dict[str, Place] = field(default_factory=dict)
    strength: Strength | None = None
    unclear: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> dict[str, str]:
        return {image: place.label for image, place in self.places.items() if place.label is not None}


@dataclass
class _Node:
    """A folder: its own images, and its folders that have images."""

    path: str = ""
    images: list[str] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)

    def below(self) -> list[str]:
        return self.images + [image for child in self.children.values() for image in child.below()]


def read(images: Iterable[str], level: int | None = None) -> Folders:
    """Read the folders of ``images``.

    Args:
        images: paths relative to the folder of the dataset.
        level: which folders are the classes, 1 for the outermost that the images do not share; None: decide.
    """
    root = _Node()
    for image in images:
        node = root
        for part in posixpath.dirname(image).split("/") if "/" in image else ():
            node = node.children.setdefault(part, _Node(posixpath.join(node.path, part)))
        node.images.append(image)
    found = Folders()
    _descend(root, None, level, found)
    _single_classes(found)
    return found


def _single_classes(found: Folders) -> None:
    """In a split with a single class, its folder does not look like a class: it has the name of one in another split."""
    classes = set(found.labels.values())
    for image, place in found.places.items():
        if place.label is None and place.split is not None:
            inside = classes.intersection(posixpath.dirname(image).split("/"))
            if len(inside) == 1:
                found.places[image] = Place(place.split, inside.pop())


def _descend(node: _Node, split: str | None, level: int | None, found: Folders) -> None:
    _add(found, node.images, Place(split))
    children = list(node.children.values())
    if not children:
        return
    parts = _parts(node)
    if parts:
        for child in children:
            if child.path in parts:
                _descend(child, parts[child.path], level, found)
            else:
                _add(found, child.below(), Place())
        return
    if len(children) == 1:
        _descend(children[0], split, level, found)
    else:
        _classes(node, split, level, found)


def _name(node: _Node) -> str:
    return posixpath.basename(node.path)


def _parts(node: _Node) -> dict[str, str]:
    """The splits of the folders in ``node``, by path; empty if they are not splits."""
    children = list(node.children.values())
    splits = {child.path: split for child in children if (split := words.split_of(_name(child))) is not None}
    if len(splits) == len(children) and (len(children) > 1 or words.is_only_split(_name(children[0]))):
        return splits
    strict = {child.path: splits[child.path] for child in children if words.is_only_split(_name(child))}
    if "train" in strict.values() and len(set(strict.values())) > 1:
        return strict
    # A single `train` among other folders is a split if it has classes in it, and a class if it has images like the others.
    if len(strict) == 1 and all(child.children if child.path in strict else not child.children for child in children):
        return strict
    return {}


def _classes(node: _Node, split: str | None, level: int | None, found: Folders) -> None:
    """The folders in ``node`` are classes, or contain them."""
    children = list(node.children.values())
    names = [_name(child) for child in children]
    strength = _strength(names)
    inner = {_name(child): _inner(child) for child in children}
    if not _same_inside(list(inner.values())):
        inner = {name: {one for one in names if not _is_number(one)} for name, names in inner.items()}
    if level is not None:
        if level > 1:
            for child in children:
                _descend(child, split, level - 1, found)
            return
    elif _same_inside(list(inner.values())) and strength != "names":
        for child in children:  # fold_1/cat, fold_2/cat
            _descend(child, split, None, found)
        return
    else:
        found.unclear = found.unclear or _doubt(node, inner)
    found.strength = max(found.strength or strength, strength, key=_WEAKER.index)
    for child in children:
        _label(child, split, found)


def _label(child: _Node, split: str | None, found: Folders) -> None:
    """All images of a class folder; ``CLASS/train`` and ``CLASS/val`` are splits."""
    parts = _parts(child) if len(child.children) > 1 and split is None else {}
    _add(found, child.images, Place(split, _name(child)))
    for inner in child.children.values():
        _add(found, inner.below(), Place(parts.get(inner.path, split), _name(child)))
    if words.without_numbers(_name(child))[:1] == ("background",) and len(words.without_numbers(_name(child))) > 1:
        note = f"{_name(child)} is used as a class; pass --ignore {child.path!r} if it is clutter"
        found.notes += [note] if note not in found.notes else []


def _inner(child: _Node) -> set[str]:
    """Names in a class folder that may be classes themselves."""
    found = set[str]()
    for name, inside in child.children.items():
        deeper = _inner(inside)
        if words.is_only_split(name) or (_means_nothing(name) and not _is_number(name)):
            found |= deeper
        else:
            found |= deeper if deeper and len(child.children) == 1 and not child.images else {name}
    return found


def _is_number(name: str) -> bool:
    return name.isdecimal() and _DATE.fullmatch(name) is None


def _means_nothing(name: str) -> bool:
    rest = set(words.without_numbers(name))
    return not rest - words.CONTAINER - words.SHARD - words.GROUP - _MONTHS or _DATE.fullmatch(name) is not None


def _same_inside(inner: list[set[str]]) -> bool:
    """Whether all folders have the same two or more folders in them."""
    common = set.intersection(*inner)
    return len(common) > 1 and len(common) * 2 > len(set.union(*inner))


def _doubt(node: _Node, inner: dict[str, set[str]]) -> str | None:
    """Why the folders in ``node`` may not be the classes."""
    repeats = next((name for name, names in inner.items() if len(names & inner.keys()) > 1), None)
    if repeats is not None:
        again = sorted(inner[repeats] & inner.keys())
        return (
            f"{posixpath.join(node.path, repeats)} contains folders with names of its neighbors ({', '.join(again[:3])}), "
            f"but other images: pass --ignore {posixpath.join(node.path, repeats)!r}, or move it out of the folder"
        )
    deep = [name for name, names in inner.items() if len(names) > 1 and not node.children[name].images]
    if len(deep) * 2 < len(inner) or not deep:
        return None
    outer, example = sorted(inner)[:3], sorted(inner[deep[0]])[:3]
    return (
        f"the classes may be the outer folders ({', '.join(outer)}) or those inside {deep[0]} ({', '.join(example)}): "
        "pass --class-level 1 for the outer ones or --class-level 2"
    )


def _strength(names: list[str]) -> Strength:
    rests = {words.without_numbers(name) for name in names}
    if all(_CAMERA_FOLDER.fullmatch(name) or (_DATE.fullmatch(name) and len(name) > 2) for name in names):
        return "parts"
    if all(set(rest) <= words.CONTAINER | words.SHARD for rest in rests) and rests != {()}:
        return "parts"
    if len(rests) > 1 or len(names) < 2:
        return "names"
    [rest] = rests
    if set(rest) & words.LABEL:
        return "names"
    return "parts" if set(rest) & (words.CONTAINER | words.SHARD | words.GROUP) else "numbers"


def _add(found: Folders, images: Iterable[str], place: Place) -> None:
    for image in images:
        found.places[image] = place


def require_same_classes(found: Folders) -> None:
    """The splits must have the same classes.

    Raises:
        Unclear: they do not.
    """
    classes: dict[str, set[str]] = defaultdict(set)
    for place in found.places.values():
        if place.split is not None and place.label is not None:
            classes[place.split].add(place.label)
    train = classes.pop("train", set())
    for split, names in classes.items():
        if train and names != train:
            sides = (("train", train - names), (split, names - train))
            parts = [f"only in {side}: {', '.join(sorted(rest)[:5])}" for side, rest in sides if rest]
            difference = "; ".join(parts) + look_alikes(sorted(train - names), names - train)
            raise Unclear(f"train and {split} have different classes: {difference}. Rename or remove those folders")
