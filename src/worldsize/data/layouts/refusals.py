"""Why a folder cannot be read: no images, archives, boxes, masks, no labels. Each message names the remedy."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import islice

from worldsize.config.wording import quoted
from worldsize.data.layouts.folders import Folders
from worldsize.data.layouts.inventory import Inventory, stem
from worldsize.data.layouts.label_tables import Labels
from worldsize.data.layouts.packed import FORMATS
from worldsize.data.layouts.reading import Unclear
from worldsize.data.unused_files import Unused, unsupported

_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".7z", ".rar")
_RECORDS = (
    ".tfrecord",
    ".tfrecords",
    ".tfrec",
    ".rec",
    ".parquet",
    ".arrow",
    ".h5",
    ".hdf5",
    ".npz",
    ".npy",
    ".lmdb",
    ".mat",
)
_BOX_LINE = re.compile(r"\d+( -?\d*\.?\d+(e-?\d+)?){4,}")
_TRIED = 20


def is_beside(other: str) -> bool:
    """Whether a file may be about the one image that has its name."""
    return posixpath.splitext(other)[1].lower() in (".txt", ".xml", ".json", ".cls", ".caption")


def no_images(found: Inventory) -> str:
    """The message about a folder without images."""
    known = [other for other in found.others if other.lower().endswith(FORMATS)]
    archives = [other for other in found.others if other.lower().endswith(_ARCHIVES)]
    packed = [other for other in found.others if other.lower().endswith(_RECORDS)]
    if known:
        return (
            f"{found.root} has no image files, but {known[0]} may contain images: pass --unpack FOLDER to write them to "
            "files in a new folder, and to read that"
        )
    if archives:
        return f"{found.root} has no image files, only archives such as {archives[0]}: unpack them first"
    if packed:
        return (
            f"{found.root} has no image files; {packed[0]} may contain images: write them to files in a folder for each "
            "class first"
        )
    if unused := not_decoded(found):
        return f"{found.root} has no images that are used. {unused.note(found.root)}"
    if found.ignored:
        image, reason = next(iter(found.ignored.items()))
        return f"{found.root} has no images that belong to a dataset; {image} is left out ({reason})"
    return (
        f"{found.root} contains no images: name the folder that has them, with a folder for each class or a table of labels"
    )


def no_labels(found: Inventory, places: Folders, families: list[Labels]) -> str:
    """The message about images without labels."""
    root = found.root
    if places.labels:
        names = sorted(set(places.labels.values()))
        return (
            f"the folders of {root} ({', '.join(names[:3])}) look like parts, not classes, and there is no table of labels: "
            "pass --labels folders if they are classes"
        )
    if any(one.boxed for one in families) or _boxes(found):
        return (
            f"{root} has boxes or regions within images, not labels of images: worldsize trains classifiers. Crop the boxes "
            "into a folder for each class"
        )
    if any("mask" in reason for reason in found.ignored.values()):
        return f"{root} has images and masks, but no labels of images: worldsize trains classifiers, not segmentation"
    parents = {posixpath.dirname(image) or "." for image in found.images}
    notes = unread(found)
    if unused := not_decoded(found):
        notes.append(unused.note(root))
    files = f" ({'; '.join(notes)})" if notes else ""
    if len(parents) == 1:
        return (
            f"all {len(found.images):,} images of {root} are in one folder ({parents.pop()}), and nothing has their "
            f"labels{files}: with a single class there is nothing to tell apart. Sort them into a folder for each class, "
            "or add a table with their files and labels"
        )
    return (
        f"nothing in {root} has labels of its {len(found.images):,} images{files}: sort them into a folder for each class, "
        "or add a table with their files and labels"
    )


def require_distinct(source: str, ambiguous: Mapping[str, list[str]], labeled: Collection[str]) -> None:
    """Refuse names that may mean several images, unless these images all have labels anyway.

    Raises:
        Unclear: names the images.
    """
    unclear = {name: images for name, images in ambiguous.items() if not all(image in labeled for image in images)}
    if unclear:
        name, images = next(iter(unclear.items()))
        count = "1 name may mean" if len(unclear) == 1 else f"{len(unclear):,} names may mean"
        raise Unclear(
            f"{source}: {count} several images: {name!r} is {' or '.join(sorted(images)[:3])}. Leave out the folder or file "
            f"that is not meant, such as --ignore {quoted(max(images))}, or write paths into the table"
        )


def _boxes(found: Inventory) -> bool:
    """Whether files with the names of images have boxes in them."""
    stems = {stem(image) for image in found.images}
    beside = (other for other in found.others if is_beside(other) and stem(other) in stems)
    for other in islice(beside, _TRIED):
        text = (found.root / other).read_text("utf-8", "replace")
        if any(mark in text for mark in ("<bndbox>", "<object>", '"shapes"', '"bbox"')):
            return True
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if lines and all(_BOX_LINE.fullmatch(line) for line in lines):
            return True
    return False


def unread(found: Inventory) -> list[str]:
    """Sentences about files that may contain images or labels and are not read."""
    notes = []
    kinds = Counter(posixpath.splitext(other.lower())[1] for other in found.others)
    for extension in (*_ARCHIVES, *_RECORDS, ".xlsx", ".xls", ".ods", ".sqlite", ".db"):
        if kinds[extension]:
            example = next(other for other in found.others if other.lower().endswith(extension))
            more = f" and {kinds[extension] - 1:,} more" if kinds[extension] > 1 else ""
            notes.append(f"{example}{more} is not read" if not more else f"{example}{more} are not read")
    return notes


def not_there(missing: list[str], found: Inventory) -> list[str]:
    """Of what tables call images, what is not there; the others are of formats that are not decoded here."""
    there = {posixpath.basename(other) for other in found.others if unsupported(other)}
    return [name for name in missing if posixpath.basename(name.replace("\\", "/")) not in there]


def not_decoded(found: Inventory) -> Unused:
    """The images of formats that are not decoded here, by their names."""
    return Unused(formats=Counter(kind for other in found.others if (kind := unsupported(other))))
