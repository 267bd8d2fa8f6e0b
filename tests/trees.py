"""Folders of tiny pictures for the tests of data sets, and all that a folder is."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest
from PIL import Image

from worldsize.data import open_dataset
from worldsize.data.samples import Dataset, FileSamples
from worldsize.errors import UserError
from worldsize.recipe import Data

COLOURS = ["red", "lime", "blue", "white", "black", "yellow"]
LONG_AGO = 1_600_000_000_000_000_000


def picture_bytes(colour: str = "red", kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(out, kind)
    return out.getvalue()


def put(path: Path, data: bytes | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture_bytes() if data is None else data)
    return path


def tree(root: Path, *paths: str) -> Path:
    for i, path in enumerate(paths):
        put(root / path, picture_bytes(COLOURS[i % len(COLOURS)]))
    return root


def two_classes(root: Path, val: str = "val") -> Path:
    return tree(root, "train/cat/1.png", "train/cat/2.png", "train/dog/3.png", f"{val}/cat/4.png", f"{val}/dog/5.png")


def settle(folder: Path) -> None:
    """Give all folders an old modification time, so that any change is a change of it."""
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
    """Unpickling it leaves a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def picture(root: Path) -> dict[str, tuple]:
    """All that a tree is: type, mode, and content or link, by name."""
    found = {}
    for path in [root, *root.rglob("*")]:
        about = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        mode = None if path.is_symlink() else stat.S_IMODE(about.st_mode)
        found[os.fsencode(path.relative_to(root))] = (stat.S_IFMT(about.st_mode), mode, content)
    return found
