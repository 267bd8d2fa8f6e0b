"""Find the image that a cell of a table means: a path, a name with or without extension, a URL."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable
from urllib.parse import parse_qs, unquote, urlsplit

from worldsize.data.datasets.file_index import has_image_extension
from worldsize.data.layouts import words

_UPLOADED = re.compile(r"[0-9a-f]{8}-(.+)")  # Label Studio puts this before the names of uploaded files
_LONGEST = 1000


class Finder:
    """Finds images by what tables call them.

    Args:
        images: paths relative to the folder of the dataset.
        splits: the split of each image as its folders say, by path.
    """

    def __init__(self, images: Iterable[str], splits: dict[str, str | None]) -> None:
        images = list(images)
        self._splits, self._paths = splits, set(images)
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        for image in images:
            name = _normal(posixpath.basename(image))
            self._by_name[name].append(image)
            self._by_stem[posixpath.splitext(name)[0]].append(image)

    def find(self, text: str, table: str) -> str | None:
        """The image that ``text`` in the file ``table`` means; None if there is none, or more than one."""
        if not text or len(text) > _LONGEST:
            return None
        path = _path(text)
        for whole in (posixpath.join(posixpath.dirname(table), path), path):
            if whole in self._paths:  # without this, equal names in a thousand folders take minutes
                return whole
        name = posixpath.basename(path)
        found = self._named(name)
        if not found and (uploaded := _UPLOADED.fullmatch(name)):
            found = self._named(uploaded[1])
        if len(found) > 1:
            found = self._nearest(found, path, table)
        return found[0] if len(found) == 1 else None

    def certainty(self, text: str, table: str) -> int:
        """How surely ``text`` means an image: 2 if it ends like its path, 1 if only the name agrees, 0 if it means none."""
        image = self.find(text, table)
        if image is None:
            return 0
        path, whole = f"/{_path(text)}", f"/{_normal(image)}"
        return 2 if whole.endswith(path) or posixpath.splitext(whole)[0].endswith(path) else 1

    def _named(self, name: str) -> list[str]:
        exact = self._by_name.get(name)
        if exact:
            return exact
        return self._by_stem.get(posixpath.splitext(name)[0] if has_image_extension(name) else name, [])

    def _nearest(self, found: list[str], path: str, table: str) -> list[str]:
        """Of images with the same name, those whose folders agree with the path, the table's folder or its split."""
        parts = posixpath.dirname(path).split("/")[::-1]
        found = _best(found, lambda image: _agreement(_normal(posixpath.dirname(image)).split("/")[::-1], parts))
        beside = posixpath.dirname(table).split("/")
        inside = [image for image in found if posixpath.dirname(table) and image.startswith(posixpath.dirname(table) + "/")]
        if len(found) > 1 and inside:
            found = _best(inside, lambda image: _agreement(image.split("/"), beside))
        split = words.split_of(posixpath.splitext(posixpath.basename(table))[0]) or words.split_of(posixpath.dirname(table))
        if len(found) > 1 and split is not None:
            found = [image for image in found if self._splits.get(image) == split]
        return found


def _best(found: list[str], score: Callable[[str], int]) -> list[str]:
    scores = [score(image) for image in found]
    return [image for image, value in zip(found, scores, strict=True) if value == max(scores)]


def _agreement(one: list[str], other: list[str]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b or not a:
            break
        count += 1
    return count


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _path(text: str) -> str:
    """The path in a cell: of a URL, its path or the file that it asks a server for."""
    text = text.strip()
    if "://" in text or "/?" in text or "?d=" in text:
        address = urlsplit(text)
        asked = parse_qs(address.query).get("d")
        text = asked[0] if asked else unquote(address.path)
    path = posixpath.normpath(_normal(text).replace("\\", "/"))
    return path.lstrip("/")
