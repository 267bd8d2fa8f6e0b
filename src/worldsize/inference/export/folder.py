"""export.json: what an export folder contains, and the hashes of its files and of itself. It is written last."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from worldsize.checkpoint import sha256
from worldsize.errors import CheckpointError

NAME = "export.json"
CARD = "README.md"  # not hashed: model hubs and people add to it
FORMAT = 2  # 1 had no hash of export.json itself
_REQUIRED = ("format", "model", "classes", "preprocessing", "preprocess", "temperature", "aoti")


def is_export(path: Path) -> bool:
    """Whether ``path`` is an export folder."""
    return (path / NAME).is_file()


def write(folder: Path, about: dict[str, Any]) -> None:
    """Write export.json for all files that are in ``folder`` now."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CARD)
    files = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in paths}
    content = {"version": FORMAT, **about, "files": files}
    (folder / NAME).write_text(json.dumps(content | {"sha256": _digest(content)}, indent=1) + "\n", "utf-8")


def _digest(content: dict[str, Any]) -> str:
    """The SHA-256 of everything but ``sha256``, however it is formatted."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(folder: Path) -> dict[str, Any]:
    """export.json, after comparing all files with it.

    Raises:
        CheckpointError: a file is missing or was changed; the message names it.
    """
    try:
        about: dict[str, Any] = json.loads((folder / NAME).read_text("utf-8"))
        if about["version"] not in (1, FORMAT):
            raise CheckpointError(
                f"{folder / NAME}: version {about['version']} is not supported; this one reads 1, {FORMAT}"
            )
        if about["version"] > 1 and about["sha256"] != _digest(about):
            raise CheckpointError(f"{folder / NAME} was changed after the export; export again")
        if missing := set(_REQUIRED) - about.keys():
            raise KeyError(min(missing))
        files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in about["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / NAME} is damaged ({type(error).__name__}: {error}); export again") from None
    for name, (size, digest) in files.items():
        if name != CARD:
            _check(folder, name, size, digest)
    return about


def _check(folder: Path, name: str, size: int, digest: str) -> None:
    path = folder / name
    if ".." in Path(name).parts or Path(name).is_absolute() or path.is_symlink():
        raise CheckpointError(f"{folder / NAME}: {name} is outside the folder")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; export again")
    if path.stat().st_size != size or sha256(path) != digest:
        raise CheckpointError(f"{path} was changed after the export (its SHA-256 differs from {NAME}); export again")
