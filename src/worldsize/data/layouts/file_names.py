"""Classes and groups in the names of files: ``cat.12.jpg``, ``Persian_cat_3.jpg``, frames of a video."""

from __future__ import annotations

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from worldsize.data.layouts import words
from worldsize.data.layouts.inventory import stem

_NUMBERED = re.compile(r"(?P<name>.*?\D)[ ._-]?\(?\d+\)?")
_TRACK = re.compile(r"(?P<group>\d+)[_-]\d+")
_FRAME = re.compile(r"(?P<group>.+?)[ ._-]*(?:frame|frm)[ ._-]*\d+", re.IGNORECASE)
_AUGMENTED = re.compile(r"(?P<group>.+)\.rf\.[0-9a-zA-Z]+")  # Roboflow's copies of one image
_FEWEST = 2  # images of a class, for a name to count as one
_MOST_CLASSES = 0.5  # classes per image


def classes(images: Iterable[str]) -> dict[str, str]:
    """The class in the name of each image that has one; empty if the names are no classes.

    A name is a word and a number. Names of cameras, such as IMG_0001, are no classes; nor is a single name.
    """
    found: dict[str, str] = {}
    for image in images:
        match = _NUMBERED.fullmatch(stem(image))
        name = match["name"].rstrip(" ._-(") if match else ""
        if name:
            found[image] = name
    counts = Counter(found.values())
    if any(set(words.without_numbers(name)) <= words.CAMERA for name in counts):
        return {}
    if len(counts) < 2 or min(counts.values()) < _FEWEST or len(counts) > _MOST_CLASSES * len(found):
        return {}
    return found


def groups(labels: dict[str, tuple[str, ...]]) -> tuple[str, dict[str, str]] | None:
    """Which images belong together by their names, and what the groups are; ``labels`` are those of each image.

    None if the names do not say it.
    """
    forms = (
        (_AUGMENTED, "the name before .rf.", False),
        (_FRAME, "the name before the frame's number", False),
        (_TRACK, "the track: the number before the frame's number, per class", True),
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


def _splittable(groups_of: dict[str, str], labels: dict[str, tuple[str, ...]]) -> bool:
    """Whether a class has two groups, so that they can be on two sides."""
    inside: dict[str, set[str]] = defaultdict(set)
    for image, group in groups_of.items():
        for label in labels[image]:
            inside[label].add(group)
    return any(len(found) > 1 for found in inside.values())
