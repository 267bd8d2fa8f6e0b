"""Folders of tiny images for the dataset tests, and snapshots of folders."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest
from PIL import Image

from worldsize.config.recipe import Data
from worldsize.data import open_dataset
from worldsize.data.file_samples import FileSamples
from worldsize.data.samples import Dataset
from worldsize.errors import UserError

COLORS = ["red", "lime", "blue", "white", "black", "yellow"]
LONG_AGO = 1_600_000_000_000_000_000


def image_bytes(color: str = "red", kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(out, kind)
    return out.getvalue()


def put(path: Path, data: bytes | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image_bytes() if data is None else data)
    return path


def tree(root: Path, *paths: str) -> Path:
    for i, path in enumerate(paths):
        put(root / path, image_bytes(COLORS[i % len(COLORS)]))
    return root


def two_classes(root: Path, val: str = "val") -> Path:
    return tree(root, "train/cat/1.png", "train/cat/2.png", "train/dog/3.png", f"{val}/cat/4.png", f"{val}/dog/5.png")


def settle(folder: Path) -> None:
    """Give all folders an old modification time, so that every change updates it."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            os.utime(path, ns=(LONG_AGO, LONG_AGO))


def opened(root: Path | None, name: str = "folder", cache: Path | None = None, **settings) -> Dataset:
    if cache is None and root is not None:
        cache = root.parent / "cache"
    return open_dataset(Data(name=name, root=root, **settings), cache or Path("nowhere"))


def refusal(root: Path | None, name: str = "folder") -> str:
    with pytest.raises(UserError) as caught:
        opened(root, name)
    return str(caught.value)


def relative_names(samples: FileSamples) -> list[str]:
    return [os.path.relpath(samples.name(i), samples.root) for i in range(len(samples))]


class Trap:
    """Creates a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def snapshot(root: Path) -> dict[str, tuple]:
    """State of a tree by name: type, mode, and content or link target."""
    entries = {}
    for path in [root, *root.rglob("*")]:
        info = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        mode = None if path.is_symlink() else stat.S_IMODE(info.st_mode)
        entries[os.fsencode(path.relative_to(root))] = (stat.S_IFMT(info.st_mode), mode, content)
    return entries
