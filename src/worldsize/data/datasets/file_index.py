"""List the images of class folders, and cache the listing."""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from worldsize.config.wording import count
from worldsize.data.confusable_names import look_alikes
from worldsize.data.datasets import listing_cache, missing
from worldsize.data.file_samples import FileSamples
from worldsize.data.images.pillow import looks_like_image, unsupported_format
from worldsize.data.unused_files import Unused, hidden, unsupported
from worldsize.errors import UserError, of_system, of_the_place

log = logging.getLogger(__name__)

_EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))


def class_folders(root: Path) -> list[str]:
    """Names of the class folders in ``root``, sorted by their bytes (the same in every locale).

    Hidden folders and those of operating systems and network storage are none, see `unused_files.hidden`.

    Raises:
        UserError: ``root`` is missing, unreadable, or contains no folders.
    """
    try:
        with os.scandir(root) as entries:
            folders = [e.name for e in entries if not hidden(e.name) and is_folder(e)]
    except FileNotFoundError:
        raise missing.error(root) from None
    except NotADirectoryError:
        raise UserError(f"{root} is a file, not a folder of class folders") from None
    except OSError as error:
        raise of_system(f"cannot list {root}: {error.strerror}", error) from None
    if not folders:
        raise UserError(f"{root} contains no class folders: expected {root}/CLASS/IMAGE")
    return sorted(folders, key=os.fsencode)


def list_classes(root: Path, classes: Iterable[str], cache: Path) -> FileSamples:
    """List the images in ``root/CLASS/`` for each class, in one pass, sorted by name.

    The listing is cached in ``cache``, and reused as long as `listings` can trust it.

    Raises:
        UserError: a class folder is unreadable or has no image.
    """
    names = tuple(classes)
    store = cache / f"index-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.npz"
    listing = listing_cache.of_folders(root, names, store, lambda: _list(root, names))
    samples = FileSamples(root, names, listing.files, listing.ends, listing.labels, names)
    samples.unused = listing.unused
    return samples


def _list(root: Path, names: tuple[str, ...]) -> listing_cache.Listing:
    unused = Unused(beside_classes=_beside(root), in_system_folders=_in_system_folders(root))
    per_class = [_images(root / name, unused) for name in names]
    files = b"".join(b"".join(p) for p in per_class)
    ends = np.cumsum(np.fromiter((len(f) for p in per_class for f in p), np.int64))
    labels = np.repeat(np.arange(len(names), dtype=np.int32), [len(p) for p in per_class])
    return listing_cache.Listing(files, ends, labels, unused)


def _beside(root: Path) -> int:
    """The number of images directly in ``root``."""
    with os.scandir(root) as entries:
        return sum(_looks_like(e.name) and not e.name.startswith(".") and not is_folder(e) for e in entries)


def _in_system_folders(root: Path) -> Counter[str]:
    """The numbers of images, by their names, in the folders beside the class folders that are none because of their names.

    Those that a class folder would have: what lies deeper, such as thumbnails, is no image of a class.
    """
    found: Counter[str] = Counter()
    with os.scandir(root) as entries:
        names = [e.name for e in entries if not e.name.startswith(".") and hidden(e.name) and is_folder(e)]
    for name in names:
        # Not everybody may list what a file system has recovered.
        with suppress(OSError), os.scandir(root / name) as inside:
            found[name] = sum(_looks_like(e.name) and not e.name.startswith(".") and not is_folder(e) for e in inside)
    return +found


def list_flat(root: Path, labels_of: dict[str, int], classes: tuple[str, ...]) -> FileSamples:
    """List the images of a flat folder. Labels come from a table, by file name without extension.

    Raises:
        UserError: the folder has no images, or one of them has no label.
    """
    unused = Unused()
    files = _images(root, unused)
    stems = [os.fsdecode(f).rsplit(".", 1)[0] for f in files]
    unlabelled = [s for s in stems if s not in labels_of]
    if unlabelled:
        raise UserError(f"{len(unlabelled)} images in {root} have no label in the table; the first is {unlabelled[0]}")
    labels = np.array([labels_of[s] for s in stems], np.int32)
    ends = np.cumsum([len(f) for f in files], dtype=np.int64)
    samples = FileSamples(root, ("",) * len(classes), b"".join(files), ends, labels, classes)
    samples.unused = unused
    return samples


def _images(folder: Path, unused: Unused) -> list[bytes]:
    """File names of the images in one folder, sorted by bytes. Adds what is not used to ``unused``.

    A file with an image extension counts as an image without being read. Any other file counts if it begins like
    one, so an image without an extension is listed and a README is not.
    """
    found, others = _listed(folder)
    if not found:
        why = f"; {others.note(folder)}" if others else ": add some, or remove the folder if it is not a class"
        raise UserError(f"{folder} contains no images{why}")
    unused.add(others)
    return sorted(found)


def _listed(folder: Path, count_nested: bool = True) -> tuple[list[bytes], Unused]:
    """The images in one folder, and those in it and (``count_nested``) in its folders that are not used."""
    found: list[bytes] = []
    unused = Unused()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is_named_image(entry):
                    found.append(os.fsencode(entry.name))
                elif is_folder(entry):
                    if hidden(entry.name):
                        continue
                    unused.nested += 1
                    unused.in_subfolders += _below(entry.path) if count_nested else 0
                else:
                    unused.opened += 1
                    if looks_like_image(head := _head(entry)):
                        found.append(os.fsencode(entry.name))
                    elif kind := unsupported(entry.name) or unsupported_format(head):
                        unused.formats[kind.lower()] += 1
    except OSError as error:
        raise of_system(f"cannot list {folder}: {error.strerror}", error) from None
    return found, unused


def _below(folder: str) -> int:
    """The number of images in the folder and in its folders, by their names."""
    count = 0
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not hidden(name)]
        count += sum(_looks_like(name) and not name.startswith(".") for name in files)
    return count


def _looks_like(name: str) -> bool:
    return has_image_extension(name) or unsupported(name) is not None


def has_image_extension(name: str) -> bool:
    """Whether a file's name ends like that of an image."""
    return os.path.splitext(name)[1].lower() in _EXTENSIONS


def below(root: Path) -> list[str]:
    """Paths of the images in ``root`` and in its folders, relative to it, sorted; hidden ones do not count.

    Warns about images of formats that are not decoded.

    Raises:
        UserError: a folder cannot be listed.
    """
    found: list[bytes] = []
    unused = Unused()

    def fail(error: OSError) -> None:
        raise of_system(f"cannot list {error.filename}: {error.strerror}", error)

    for folder, folders, _ in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not hidden(name)]
        inside = os.fsencode(os.path.relpath(folder, root))
        names, others = _listed(Path(folder), count_nested=False)
        found += [name if inside == b"." else inside + b"/" + name for name in names]
        unused.formats += others.formats
    if unused:
        log.warning("%s", unused.note(root))
    return [os.fsdecode(name) for name in sorted(found)]


def require_files(images: Iterable[str], root: Path, source: Path) -> dict[str, set[str]]:
    """Check that ``images`` exist, by their paths in ``root``; ``source`` names them.

    Lists each folder once, which on network storage takes less time than looking for each image.

    Returns:
        The names of the other files in these folders, by folder.

    Raises:
        UserError: an image is missing, or a folder cannot be listed.
    """
    images = list(images)
    present: dict[str, set[str]] = {}
    missing = []
    for image in images:
        parent, name = posixpath.split(image)
        if parent not in present:
            try:
                present[parent] = set(os.listdir(root / parent))
            except (FileNotFoundError, NotADirectoryError):
                present[parent] = set()
            except OSError as error:
                raise of_system(f"cannot list {root / parent}: {error.strerror}", error) from None
        if name not in present[parent]:
            missing.append(image)
    if missing:
        found = (posixpath.join(parent, name) for parent, names in present.items() for name in names)
        alike = look_alikes(missing, found)
        raise UserError(f"{source} names {count(len(missing))} not in {root}; the first is {missing[0]}{alike}")
    for image in images:
        parent, name = posixpath.split(image)
        present[parent].discard(name)
    return present


def _is_named_image(entry: os.DirEntry[str]) -> bool:
    return has_image_extension(entry.name) and not is_folder(entry)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether this is a folder or a symbolic link to one; False for a link that leads back to itself.

    Raises:
        OSError: the disk does not answer, so it is unknown.
    """
    try:
        return entry.is_dir()
    except OSError as error:
        if of_the_place(error):
            raise
        return False


def _head(entry: os.DirEntry[str]) -> bytes:
    """The first bytes of a file; nothing if it is none or cannot be read."""
    try:
        if not entry.is_file():
            return b""
        with open(entry.path, "rb") as file:
            return file.read(16)
    except OSError as error:
        if of_the_place(error):  # or the listing would depend on it
            raise
        return b""
