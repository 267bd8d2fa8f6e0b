"""Find the image that a cell of a table means: a path, a name with or without extension, a URL."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from urllib.parse import parse_qs, unquote, urlsplit

from worldsize.data.datasets.file_index import has_image_extension
from worldsize.data.layouts import words

_UPLOADED = re.compile(r"[0-9a-f]{8}-(.+)")  # Label Studio puts this before the names of uploaded files
_BEGINNING = re.compile(r"\w+://[^/]*|[A-Za-z]:|[/\\]")
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
        self._folders = _runs(images)
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        for image in images:
            name = _normal(posixpath.basename(image))
            self._by_name[name].append(image)
            self._by_stem[posixpath.splitext(name)[0]].append(image)

    def find(self, text: str, table: str) -> str | None:
        """The image that ``text`` in the file ``table`` means; None if there is none, or more than one."""
        found = self.candidates(text, table)
        return found[0] if len(found) == 1 else None

    def candidates(self, text: str, table: str, followed: Collection[str] = ()) -> list[str]:
        """The images that ``text`` in the file ``table`` may mean: it is unclear which, if there are several.

        Args:
            text: a cell.
            table: its file, relative to the folder of the dataset.
            followed: the beginnings of paths after which the stated folder must be that of the image; see `followed`.
        """
        if not text or len(text) > _LONGEST:
            return []
        path = _path(text)
        for whole in (posixpath.join(posixpath.dirname(table), path), path):
            if whole in self._paths:  # without this, equal names in a thousand folders take minutes
                return [whole]
        found = self._with_name(path, _beginning(text) in followed)
        return self._nearest(found, path, table) if len(found) > 1 else found

    def followed(self, texts: Iterable[str], table: str) -> set[str]:
        """The beginnings (nothing, a slash, a drive, a server) of those texts in ``table`` that state an image's folder."""
        found = set[str]()
        for text in texts:
            if (beginning := _beginning(text)) in found or len(text) > _LONGEST:
                continue
            stated = posixpath.dirname(_path(text))
            if stated and (image := self.find(text, table)) is not None and _lies_in(image, stated):
                found.add(beginning)
        return found

    def _with_name(self, path: str, strict: bool) -> list[str]:
        """The images with the name in ``path``, without those in another folder of this dataset than it states."""
        name, stated = posixpath.basename(path), posixpath.dirname(path)
        found = self._named(name)
        if not found and (uploaded := _UPLOADED.fullmatch(name)):
            return self._named(uploaded[1])  # the folder is one of the server
        if not stated:
            return found
        if strict:
            return [image for image in found if _lies_in(image, stated)]
        known = self._known(stated)
        return [image for image in found if f"/{known}/" in f"/{_folder(image)}/"] if known else found

    def _known(self, folder: str) -> str:
        """The longest end of the path ``folder`` that folders of this dataset have, too; empty if there is none."""
        parts = folder.split("/")
        return next((end for i in range(len(parts)) if (end := "/".join(parts[i:])) in self._folders), "")

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
        found = _best(found, lambda image: _agreement(_folder(image).split("/")[::-1], parts))
        beside = posixpath.dirname(table).split("/")
        inside = [image for image in found if posixpath.dirname(table) and image.startswith(posixpath.dirname(table) + "/")]
        if len(found) > 1 and inside:
            found = _best(inside, lambda image: _agreement(image.split("/"), beside))
        split = words.split_of(posixpath.splitext(posixpath.basename(table))[0]) or words.split_of(posixpath.dirname(table))
        if len(found) > 1 and split is not None:
            found = [image for image in found if self._splits.get(image) == split]
        if len(found) > 1 and len({_without_split(image) for image in found}) == 1:  # images to predict have no labels
            found = [image for image in found if self._splits.get(image) != "test"]
        return found


def _beginning(text: str) -> str:
    match = _BEGINNING.match(text.strip())
    return match[0] if match else ""


def _folder(image: str) -> str:
    return _normal(posixpath.dirname(image))


def _lies_in(image: str, stated: str) -> bool:
    """Whether the image is in the folder ``stated`` or below it; the path of either may begin further up."""
    folder = _folder(image)
    return f"/{stated}/" in f"/{folder}/" or (folder != "" and f"/{stated}".endswith(f"/{folder}"))


def _runs(images: Iterable[str]) -> set[str]:
    """All parts of the paths of the folders of ``images``: of a/b these are a, b and a/b."""
    found = set()
    for folder in {_folder(image) for image in images} - {""}:
        parts = folder.split("/")
        found |= {"/".join(parts[i:k]) for i in range(len(parts)) for k in range(i + 1, len(parts) + 1)}
    return found


def _without_split(image: str) -> tuple[str, ...]:
    """The parts of the path that do not only name a split."""
    return tuple(part for part in image.split("/") if not words.is_only_split(part))


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
