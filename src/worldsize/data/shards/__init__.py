"""Packed data sets: shards of some 100 MB that `tar` and WebDataset read, beside an index.

`format` and `tar` say what is on disk; `samples` reads it; `pack` makes it (`plan`, `pictures` and `write` are its
parts).
"""

from __future__ import annotations

import re
from pathlib import Path

from worldsize.data.samples import Dataset
from worldsize.data.shards.format import INDEX, Packed, shard_name
from worldsize.data.shards.samples import ShardSamples
from worldsize.data.shards.store import Local, Remote, Store
from worldsize.errors import UserError

__all__ = ["is_packed", "open_dataset", "page", "url_of"]


def is_packed(root: Path) -> bool:
    """Whether this folder holds shards of ours, whole or not, and no data set of another kind."""
    signs = ("train.index", shard_name("train", 0))
    return any((root / name).is_file() for name in signs) and not (root / "train").is_dir()


def url_of(root: Path) -> str | None:
    """The URL that became this path, as ``s3://BUCKET/FOLDER`` becomes ``s3:/BUCKET/FOLDER``; None where it was a path."""
    match = re.fullmatch(r"([a-z][a-z0-9+]+):/+(.+)", str(root))
    if match is None:
        return None
    return f"{match[1]}://{'/' if match[1] == 'file' else ''}{match[2]}"


def open_dataset(root: Path | str | Store) -> Dataset:
    """The data set packed in this folder, at this URL, or in this store.

    Raises:
        UserError: no shards are there, or shards of a later version.
        DataError: something is missing or damaged.
    """
    store = _store(root)
    packed = page(store)
    return Dataset(ShardSamples(store, "train", packed), ShardSamples(store, "val", packed))


def page(store: Store) -> Packed:
    """The page that describes a folder of shards.

    Raises:
        UserError, DataError: as of `open_dataset`.
    """
    where = f"{store.where}/{INDEX}"
    try:
        return Packed.from_json(bytes(store.whole(INDEX)), where)
    except FileNotFoundError:
        raise UserError(f"{where} is missing: run `worldsize data pack` to its end, or copy it from where it did") from None
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror or error}") from None


def _store(root: Path | str | Store) -> Store:
    if isinstance(root, Store):
        return root
    return Remote(root) if isinstance(root, str) and "://" in root else Local(Path(root))
