"""Images that lie in a dataset's folders and are not used, and why."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# Formats of images that are not decoded here, by the extension that names them.
_PHOTOS = ("avif", "avifs", "heic", "heics", "heif", "hif", "jxl", "jp2", "j2k", "jpf", "jpx", "jxr", "wdp")
_GRAPHICS = ("tga", "psd", "exr", "hdr", "dds", "ico", "icns", "pcx", "sgi", "svg", "eps")
_RAW = ("dng", "cr2", "cr3", "nef", "arw", "orf", "rw2", "raf")  # of cameras
_UNSUPPORTED = frozenset((*_PHOTOS, *_GRAPHICS, *_RAW))
# Folders of operating systems and of network storage, and why their content does not count.
_SYSTEM = {
    "__macosx": "resource fork",
    "@eadir": "thumbnail",
    "#recycle": "recycle bin",
    "$recycle.bin": "recycle bin",
    "lost+found": "recovered file",
}


@dataclass
class Unused:
    """Numbers of images by why they are not used.

    Attributes:
        in_subfolders: in a folder of a class folder.
        beside_classes: directly in the folder of the classes.
        in_system_folders: in folders of the operating system or of network storage beside the class folders, by folder.
        unnamed: next to images that a table names, but in no table.
        formats: of formats that cannot be read, by format.
        nested: folders in class folders, with images or without.
        opened: files that were opened, because their names do not say whether they are images.
    """

    in_subfolders: int = 0
    beside_classes: int = 0
    in_system_folders: Counter[str] = field(default_factory=Counter)
    unnamed: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    nested: int = 0
    opened: int = 0

    def __bool__(self) -> bool:
        return any((self.in_subfolders, self.beside_classes, self.in_system_folders.total(), self.unnamed, self.formats))

    def __str__(self) -> str:
        kinds, systems = ", ".join(sorted(self.formats)), ", ".join(sorted(self.in_system_folders))
        counted = (
            (self.in_subfolders, "in subfolders"),
            (self.beside_classes, "outside the class folders"),
            (self.in_system_folders.total(), f"in folders that are no classes ({systems})"),
            (self.unnamed, "that no table names"),
            (self.formats.total(), f"of unsupported formats ({kinds})"),
        )
        return "not used: " + ", ".join(f"{number:,} {why}" for number, why in counted if number)

    def add(self, other: Unused) -> None:
        self.in_subfolders += other.in_subfolders
        self.beside_classes += other.beside_classes
        self.in_system_folders += other.in_system_folders
        self.unnamed += other.unnamed
        self.formats += other.formats
        self.nested += other.nested
        self.opened += other.opened

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Unused:
        values = json.loads(text)
        return cls(**values | {name: Counter(values.get(name, {})) for name in ("formats", "in_system_folders")})

    def note(self, folder: Path) -> str:
        """A sentence about the images in ``folder``, with the remedies."""
        moves = self.in_subfolders or self.beside_classes
        remedies = ["move them into FOLDER/CLASS"] * bool(moves) + ["convert them to JPEG, PNG or WebP"] * bool(self.formats)
        remedies += ["rename those folders"] * bool(self.in_system_folders)
        remedies += ["add them to the tables"] * bool(self.unnamed)
        return f"{folder}: {self}; to use them, {', or '.join(remedies)}"


def hidden(name: str) -> str | None:
    """Why a file or folder of this name, and what is in it, belongs to no dataset; None if it may."""
    if name.startswith("._"):
        return "resource fork, no image"
    if name.startswith("."):
        return "hidden" if "thumb" not in name else "thumbnail"
    return _SYSTEM.get(name.lower())


def unsupported(name: str) -> str | None:
    """The format that the extension of a file's name means, if it is one of images that are not decoded here."""
    extension = os.path.splitext(name)[1].lower().removeprefix(".")
    return extension if extension in _UNSUPPORTED else None
