"""Trees of images with labels, and what is read from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trees import image_bytes, put
from worldsize.data import layouts
from worldsize.data.layouts import Hints, Reading, Unclear


def labels(reading: Reading) -> dict[str, str]:
    return {row.file: "+".join(sorted(row.labels)) for row in reading.rows}


def splits(reading: Reading) -> dict[str, str | None]:
    return {row.file: row.split for row in reading.rows}


def numbered(*folders: str, count: int = 3) -> list[str]:
    """Paths of images, with another name in each folder."""
    return [f"{folder}/{100 * i + n}.png" for i, folder in enumerate(folders) for n in range(count)]


def unequal(root: Path, *paths: str) -> Path:
    """Images that all have different bytes."""
    for i, path in enumerate(paths):
        put(root / path, image_bytes(f"#{i * 7919 % 2**24:06x}"))
    return root


def written(root: Path, **files: str) -> Path:
    for name, text in files.items():
        stem, _, extension = name.rpartition("_")
        (root / f"{stem}.{extension}").write_text(text, "utf-8")
    return root


def refusal(root: Path, **hints) -> str:
    with pytest.raises(Unclear) as caught:
        layouts.read(root, Hints(**hints))
    return str(caught.value)


IDS = ["0a1", "7", "0012", "x-y"]


def four(root: Path) -> Path:
    return unequal(root, *(f"train_images/{name}.jpg" for name in IDS), "test_images/99.jpg")
