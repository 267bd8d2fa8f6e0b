"""Images that are in the folders of several classes under the same name: one folder per label, or mistakes."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from worldsize.data.layouts.evidence import Evidence
from worldsize.data.layouts.folders import Folders
from worldsize.data.layouts.inventory import same, size
from worldsize.data.layouts.reading import Hints, Unclear

_MANY = 0.05  # of the images


def _candidates(found: Evidence, places: Folders, root: Path) -> Iterator[list[str]]:
    """Images of a split with the same name and the same size, sorted."""
    named: dict[tuple[str | None, str], list[str]] = defaultdict(list)
    for image in sorted(found.labels):
        named[places.places[image].split, posixpath.basename(image)].append(image)
    for images in named.values():
        sizes: dict[int, list[str]] = defaultdict(list)
        for image in images if len(images) > 1 else ():
            sizes[size(root / image)].append(image)
        yield from (alike for alike in sizes.values() if len(alike) > 1)


def settle(found: Evidence, places: Folders, root: Path, hints: Hints) -> Evidence:
    """Join the labels of the same image in several folders, if images may have several.

    Raises:
        Unclear: many images are in several folders, and it is not said whether they may have several labels.
    """
    if hints.kind == "single":
        return found
    copies: dict[str, str] = {}
    for images in _candidates(found, places, root):
        kept: list[str] = []
        for image in images:
            first = next((one for one in kept if same(root / one, root / image)), None)
            if first is not None and found.labels[first] != found.labels[image]:
                copies[image] = first
            else:
                kept.append(image)
    if hints.kind != "multi":
        if len(copies) > _MANY * len(found.labels):
            image = min(copies)
            raise Unclear(
                f"{len(copies):,} images are in the folders of several classes, such as {image} and {copies[image]}: pass "
                "--kind multi if an image may have several labels, or --kind single to use each as it is"
            )
        return found
    labels = {image: one for image, one in found.labels.items() if image not in copies}
    for image, first in sorted(copies.items()):
        labels[first] = tuple(dict.fromkeys((*labels[first], *found.labels[image])))
    notes = [*found.notes, f"{len(copies):,} files repeat an image in the folder of another label"]
    return Evidence(labels, True, found.source, found.missing, notes=notes)
