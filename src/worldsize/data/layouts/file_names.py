"""Classes and groups in the names of files: ``cat.12.jpg``, ``Persian_cat_3.jpg``, frames of a video."""

from __future__ import annotations

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from worldsize.data.layouts import words
from worldsize.data.layouts.inventory import stem

_NUMBERED = re.compile(r"(?P<name>.*?\D)[ ._-]?\(?\d+\)?")
_NUMBER_FIRST = re.compile(r"\(?\d+\)?[ ._-]+(?P<name>\D+)")
_CODE = re.compile(r"n\d{8}")  # WordNet's
_TRACK = re.compile(r"(?P<group>\d+)[_-]\d+")
_FRAME = re.compile(r"(?P<group>.+?)[ ._-]*(?:frame|frm)[ ._-]*\d+", re.IGNORECASE)
_AUGMENTED = re.compile(r"(?P<group>.+)\.rf\.[0-9a-zA-Z]+")  # Roboflow's copies of one image
_FEWEST = 2  # images of a class, for a name to count as one
_COVERED = 0.8  # of the images must have a class in their names
_MOST_CLASSES = 0.5  # classes per image


def classes(images: Iterable[str]) -> dict[str, str]:
    """The class in the name of each image that has one; empty if the names are no classes.

    A name is a word and a number, in this order or the other. Names of cameras, such as IMG_0001, are no classes; nor is a
    single name.
    """
    images = list(images)
    return next((found for form in (_NUMBERED, _NUMBER_FIRST) if (found := _matching(images, form))), {})


def _matching(images: list[str], form: re.Pattern[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for image in images:
        match = form.fullmatch(stem(image))
        name = match["name"].strip(" ._-(") if match else ""
        if name:
            found[image] = name
    counts = Counter(found.values())
    if any(not _may_be_class(name) for name in counts) or len(found) < _COVERED * len(images):
        return {}
    if len(counts) < 2 or min(counts.values()) < _FEWEST or len(counts) > _MOST_CLASSES * len(found):
        return {}
    return found


def _may_be_class(name: str) -> bool:
    """Whether the name is a word, or a code such as n02085620, and not that of a camera, a person or a video."""
    rest = set(words.without_numbers(name))
    if rest <= words.CAMERA or rest & words.GROUP:
        return False
    return _CODE.fullmatch(name) is not None or (not re.search(r"\d", name) and len(name) > 1)


def groups(labels: dict[str, tuple[str, ...]]) -> tuple[str, dict[str, str]] | None:
    """Which images belong together by their names, and what they have in common; ``labels`` are those of each image.

    None if the names do not say it.
    """
    by_folder = _folder_groups(labels)
    if by_folder:
        return "folder", by_folder
    forms = (
        (_AUGMENTED, "name before .rf.", False),
        (_FRAME, "name before the frame's number", False),
        (_TRACK, "track (the number before the frame's number, per class)", True),
    )
    for form, what, per_class in forms:
        matches = {image: form.fullmatch(stem(image)) for image in labels}
        if not all(matches.values()):
            continue
        found = {
            image: "/".join(
                [*(labels[image] if per_class else ()), posixpath.dirname(image) if per_class else "", match["group"]]
            )
            for image, match in matches.items()
            if match
        }
        if 1 < len(set(found.values())) < len(found) and _splittable(found, labels):
            return what, found
    return None


def _folder_groups(labels: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Groups by the folders whose names say so, such as patient_7."""
    found = {}
    for image in labels:
        parts = posixpath.dirname(image).split("/")
        places = [i for i, part in enumerate(parts) if set(words.words(part)) & words.GROUP and re.search(r"\d", part)]
        if not places or "/".join(parts[: places[0] + 1]) == posixpath.join(*labels[image], ""):
            return {}
        found[image] = parts[places[0]]
    return found if 1 < len(set(found.values())) < len(found) and _splittable(found, labels) else {}


def _splittable(groups_of: dict[str, str], labels: dict[str, tuple[str, ...]]) -> bool:
    """Whether a class has two groups, so that they can be on two sides."""
    inside: dict[str, set[str]] = defaultdict(set)
    for image, group in groups_of.items():
        for label in labels[image]:
            inside[label].add(group)
    return any(len(found) > 1 for found in inside.values())
