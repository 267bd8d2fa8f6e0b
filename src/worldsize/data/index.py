"""Listing a folder of classes once, and remembering it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from worldsize.data.decode import looks_like_picture
from worldsize.data.samples import FileSamples
from worldsize.errors import UserError

log = logging.getLogger(__name__)

_USUAL = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_VERSION = 1


def class_folders(root: Path) -> list[str]:
    """Names of the class folders in ``root``, in the order of their bytes (the same under every locale).

    Raises:
        UserError: ``root`` is missing, unreadable, or holds no folders.
    """
    try:
        with os.scandir(root) as entries:
            folders = [e.name for e in entries if not e.name.startswith(".") and e.is_dir()]
    except FileNotFoundError:
        raise UserError(f"there is no folder {root}") from None
    except NotADirectoryError:
        raise UserError(f"{root} is a file, not a folder of class folders") from None
    except OSError as error:
        raise UserError(f"cannot list {root}: {error.strerror}") from None
    if not folders:
        raise UserError(f"{root} holds no class folders: expected {root}/CLASS/PICTURE")
    return sorted(folders, key=os.fsencode)


def list_classes(root: Path, classes: Iterable[str], cache: Path) -> FileSamples:
    """The pictures in ``root/CLASS/`` for each class, in one pass, sorted by name.

    The listing is kept in ``cache`` and used again while no class folder's modification time has changed
    (which happens whenever a file in it is added, removed or renamed).

    Raises:
        UserError: a class folder is unreadable or has no picture.
    """
    names = tuple(classes)
    stamp = _stamp(root, names)
    store = cache / f"index-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.npz"
    cached = _load(store, stamp)
    if cached is not None:
        files, ends, labels = cached
    else:
        per_class = [_pictures(root / name) for name in names]
        files = b"".join(b"".join(p) for p in per_class)
        ends = np.cumsum(np.fromiter((len(f) for p in per_class for f in p), np.int64))
        labels = np.repeat(np.arange(len(names), dtype=np.int32), [len(p) for p in per_class])
        _save(store, stamp, files, ends, labels)
    return FileSamples(root, names, files, ends, labels, names)


def list_flat(root: Path, labels_of: dict[str, int], classes: tuple[str, ...]) -> FileSamples:
    """The pictures of a flat folder whose labels come from a table, by file name without extension.

    Raises:
        UserError: the folder has no pictures, or one of them has no label.
    """
    files = _pictures(root)
    stems = [os.fsdecode(f).rsplit(".", 1)[0] for f in files]
    unlabelled = [s for s in stems if s not in labels_of]
    if unlabelled:
        raise UserError(f"{len(unlabelled)} pictures in {root} have no label in its table, the first is {unlabelled[0]}")
    labels = np.array([labels_of[s] for s in stems], np.int32)
    ends = np.cumsum([len(f) for f in files], dtype=np.int64)
    return FileSamples(root, ("",) * len(classes), b"".join(files), ends, labels, classes)


def _pictures(folder: Path) -> list[bytes]:
    """File names of the pictures in one folder, sorted by bytes.

    A usual extension is believed until the file is read; any other file is looked into, so that a picture
    without one counts and a README does not.
    """
    try:
        with os.scandir(folder) as entries:
            found = [os.fsencode(e.name) for e in entries if not e.name.startswith(".") and (_looks_usual(e) or _sniff(e))]
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from None
    if not found:
        raise UserError(f"{folder} holds no pictures")
    return sorted(found)


def _looks_usual(entry: os.DirEntry[str]) -> bool:
    return os.path.splitext(entry.name)[1].lower() in _USUAL and not entry.is_dir()


def _sniff(entry: os.DirEntry[str]) -> bool:
    try:
        if not entry.is_file():
            return False
        with open(entry.path, "rb") as file:
            return looks_like_picture(file.read(16))
    except OSError:
        return False


def _stamp(root: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256(f"{_VERSION}".encode())
    for name in names:
        try:
            modified = os.stat(root / name).st_mtime_ns
        except OSError as error:
            raise UserError(f"cannot look into {root / name}: {error.strerror}") from None
        digest.update(os.fsencode(name) + b"\0%d\0" % modified)
    return digest.hexdigest()


def _load(store: Path, stamp: str) -> tuple[bytes, np.ndarray, np.ndarray] | None:
    try:
        with np.load(store, allow_pickle=False) as saved:
            if str(saved["stamp"]) == stamp:
                return saved["files"].tobytes(), saved["ends"], saved["labels"]
    except FileNotFoundError:
        pass
    except Exception as error:  # a damaged cache is only a slow start
        log.warning("listing the folder again: the cached index %s is damaged (%s)", store, error)
    return None


def _save(store: Path, stamp: str, files: bytes, ends: np.ndarray, labels: np.ndarray) -> None:
    temporary = store.with_name(f"{store.name}.tmp-{os.getpid()}")
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(file, stamp=stamp, files=np.frombuffer(files, np.uint8), ends=ends, labels=labels)
        os.replace(temporary, store)
    except OSError as error:
        log.warning("cannot cache the index in %s: %s", store, error)
        with suppress(OSError):
            temporary.unlink()
