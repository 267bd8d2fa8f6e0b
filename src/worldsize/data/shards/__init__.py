"""Packed datasets: tar shards, readable by `tar` and WebDataset, with an index next to them.

`format` and `tar` define the files; `samples` reads them from a `store`; `pack` creates them with `images` and `write`.
"""

from __future__ import annotations

import re
from pathlib import Path

from worldsize.data.samples import Dataset
from worldsize.data.shards.format import INDEX, Packed, shard_name
from worldsize.data.shards.samples import ShardSamples
from worldsize.data.shards.store import Local, Remote, Store
from worldsize.errors import UserError

__all__ = ["is_packed", "metadata", "open_dataset", "url_of"]


def is_packed(root: Path) -> bool:
    """Whether this folder holds worldsize shards, complete or not, and no other kind of dataset."""
    markers = ("train.index", shard_name("train", 0))
    return any((root / name).is_file() for name in markers) and not (root / "train").is_dir()


def url_of(root: Path) -> str | None:
    """Undo `Path`'s change of a URL (``s3://BUCKET/FOLDER`` to ``s3:/BUCKET/FOLDER``); None if ``root`` is a local path."""
    match = re.fullmatch(r"([a-z][a-z0-9+]+):/+(.+)", str(root))
    if match is None:
        return None
    return f"{match[1]}://{'/' if match[1] == 'file' else ''}{match[2]}"


def open_dataset(root: Path | str | Store) -> Dataset:
    """Open the packed dataset in this folder, at this URL, or in this store.

    Raises:
        UserError: there are no shards, or they have a newer format version.
        DataError: a file is missing or damaged.
    """
    store = _store(root)
    packed = metadata(store)
    return Dataset(ShardSamples(store, "train", packed), ShardSamples(store, "val", packed))


def metadata(store: Store) -> Packed:
    """Read index.json.

    Raises:
        UserError, DataError: see `open_dataset`.
    """
    path = f"{store.where}/{INDEX}"
    try:
        return Packed.from_json(bytes(store.read_all(INDEX)), path)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: run `worldsize data pack` until it completes, or copy the missing file"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _store(root: Path | str | Store) -> Store:
    if isinstance(root, Store):
        return root
    return Remote(root) if isinstance(root, str) and "://" in root else Local(Path(root))
