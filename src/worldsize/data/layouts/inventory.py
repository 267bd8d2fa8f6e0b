"""What a folder contains: images, files that may have their labels, and images that do not belong to the dataset."""

from __future__ import annotations

import os
import posixpath
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from worldsize.data.datasets.file_index import has_image_extension, is_folder
from worldsize.data.images.pillow import looks_like_image
from worldsize.data.layouts import words
from worldsize.data.unused_files import hidden
from worldsize.errors import UserError

_MASK_SUFFIX = re.compile(r"[ _-](mask|trimap|segmentation|seg|gt|annotation)s?([ _-]?\d+)?$", re.IGNORECASE)
# Files that are opened to find out whether they are images: those without one of the extensions of other formats.
_NO_EXTENSION = re.compile(r"[^.]+|.*\.\d+|.*\.[^.]{7,}")


@dataclass
class Inventory:
    """All files below ``root``, by their paths relative to it, sorted; with ``/`` on every system.

    Attributes:
        images: those that may belong to the dataset.
        ignored: those that do not, and why.
        others: files that are no images.
        empty: folders without images, the outermost ones.
    """

    root: Path
    images: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)


def take(root: Path, ignore: tuple[str, ...] = ()) -> Inventory:
    """List everything below ``root``. ``ignore``: folders and files that do not belong to the dataset.

    Raises:
        UserError: a folder cannot be listed, or a name in ``ignore`` is not there.
    """
    found = Inventory(root)
    unwanted = {posixpath.normpath(name.replace(os.sep, "/")) for name in ignore}
    for name in unwanted:
        if not os.path.lexists(root / name):
            raise UserError(f"--ignore {name}: {root} has no such folder or file")
    _walk(found, "", None, unwanted, (os.path.realpath(root),))
    for images in (found.images, found.others):
        images.sort()
    _leave_out(found, _masks(found.images))
    _leave_out(found, _copies(root, found.images))
    found.empty = _empty(root, [*found.images, *found.ignored])
    return found


def _walk(found: Inventory, folder: str, reason: str | None, unwanted: set[str], above: tuple[str, ...]) -> None:
    try:
        with os.scandir(found.root / folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"cannot list {found.root / folder}: {error.strerror}") from None
    for entry in entries:
        path = posixpath.join(folder, entry.name)
        why = reason or ("named by --ignore" if path in unwanted else hidden(entry.name))
        if is_folder(entry):
            real = os.path.realpath(entry.path)
            if real not in above:  # a link to a folder above would never end
                _walk(found, path, why, unwanted, (*above, real))
        elif has_image_extension(entry.name) or _begins_like_one(entry):
            if why is None:
                found.images.append(path)
            else:
                found.ignored[path] = why
        elif why is None:
            found.others.append(path)


def _begins_like_one(entry: os.DirEntry[str]) -> bool:
    if not _NO_EXTENSION.fullmatch(entry.name):
        return False
    try:
        if not entry.is_file():
            return False
        with open(entry.path, "rb") as file:
            return looks_like_image(file.read(16))
    except OSError:
        return False


def _leave_out(found: Inventory, reasons: dict[str, str]) -> None:
    found.ignored |= reasons
    found.images = [image for image in found.images if image not in reasons]


def stem(path: str) -> str:
    """The name of a file without its folder and its extension."""
    return posixpath.splitext(posixpath.basename(path))[0]


def _masks(images: list[str]) -> dict[str, str]:
    """Images that belong to another image: masks and thumbnails."""
    plain = {(_place(image), stem(image)) for image in images if not _beside(image) and not _MASK_SUFFIX.search(stem(image))}
    found = {}
    for image in images:
        name = stem(image)
        suffix = _MASK_SUFFIX.search(name)
        kind = _beside(image) or ("mask" if suffix else None)
        # Compared with the folder too: of the classes `mask` and `bare`, mask/1.jpg is no mask of bare/1.jpg.
        if kind is not None and (_place(image), name[: suffix.start()] if suffix else name) in plain:
            found[image] = f"{kind} of another image"
    return found


def _beside(image: str) -> str | None:
    """What the names of its folders say that an image is, if that is not an image of its own."""
    for part in posixpath.dirname(image).split("/"):
        found = set(words.words(part))
        # `seg_train` has segmented photos; `train_masks` has masks.
        if found & words.MASK and (not words.split_of(part) or found & {"mask", "masks"}):
            return "mask"
        if found & words.THUMBNAIL:
            return "thumbnail"
    return None


def _place(image: str) -> tuple[tuple[str, ...], ...]:
    """The words of the folders, without those that only distinguish an image from its mask: images/cat, masks/cat."""
    without = words.MASK | words.THUMBNAIL | words.CONTAINER
    parts = (tuple(w for w in words.words(part) if w not in without) for part in posixpath.dirname(image).split("/"))
    return tuple(part for part in parts if part)


def _copies(root: Path, images: list[str]) -> dict[str, str]:
    """Images of folders that repeat the content of another folder, byte by byte."""
    below: dict[str, list[str]] = defaultdict(list)
    for image in images:
        folder = posixpath.dirname(image)
        while folder:
            below[folder].append(image)
            folder = posixpath.dirname(folder)
    known, copies = set(images), dict[str, str]()
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)  # folders that may have the same content
    for folder in sorted(below, key=lambda name: (name.count("/"), len(name), name)):
        inside = [image[len(folder) + 1 :] for image in below[folder]]
        if not any("/" in name for name in inside) or below[folder][0] in copies:
            continue
        signature = (size(root / below[folder][0]), *inside)
        twins = alike[signature]
        for other in _counterparts(folder, twins):
            if posixpath.join(other, inside[0]) not in known:
                continue
            pairs = {f"{folder}/{name}": posixpath.join(other, name) for name in inside}
            if all(to in known and to not in copies and same(root / one, root / to) for one, to in pairs.items()):
                copies |= {one: f"second copy of {to}" for one, to in pairs.items()}
                break
        twins.append(folder)
    return copies


def size(path: Path) -> int:
    """The size of a file in bytes, -1 if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _counterparts(folder: str, twins: list[str]) -> list[str]:
    """Folders that ``folder`` may repeat: those around it, and ``twins`` that are not other splits."""
    around, parent = [], folder
    while parent:
        parent = posixpath.dirname(parent)
        around.append(parent)
    split = words.split_of(posixpath.basename(folder))
    return around + [other for other in twins if words.split_of(posixpath.basename(other)) == split]


def same(one: Path, other: Path) -> bool:
    """Whether two files have the same bytes."""
    try:
        return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _empty(root: Path, images: list[str]) -> list[str]:
    """The outermost folders without images, below the folders that have some."""
    full = {""}
    for image in images:
        folder = posixpath.dirname(image)
        while folder and folder not in full:
            full.add(folder)
            folder = posixpath.dirname(folder)
    empty = []
    for folder in sorted(full):
        with os.scandir(root / folder) as entries:
            names = [entry.name for entry in entries if is_folder(entry) and not hidden(entry.name)]
        empty += [path for name in sorted(names) if (path := posixpath.join(folder, name)) not in full]
    return empty
