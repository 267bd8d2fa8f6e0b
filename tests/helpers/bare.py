"""A Python with torch and torchvision and none of our other dependencies, as GPU machines have, and wheels of those."""

from __future__ import annotations

import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(names: Iterable[str]) -> set[str]:
    """These installed distributions and all that they require."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        required = [Requirement(line) for line in distribution(name).requires or ()]
        left += [canonicalize_name(r.name) for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


TORCH = needed(["torch", "torchvision"])


def bare_python(folder: Path) -> Path:
    """The executable of a new environment with torch, torchvision and what they require, and not even pip."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in TORCH:
        for top in {file.parts[0] for file in _files(distribution(name))}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution(name).locate_file(top))
    return folder / "bin" / "python"


def wheels(names: Iterable[str], folder: Path) -> Path:
    """Wheels of these installed distributions and of what they require, except what `bare_python` has."""
    folder.mkdir()
    for name in needed(names) - TORCH:
        one = distribution(name)
        lines = (one.read_text("WHEEL") or "").splitlines()
        tags = [line.split(": ")[1].split("-") for line in lines if line.startswith("Tag:")]
        tag = "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True))
        wheel = folder / f"{canonicalize_name(one.metadata['Name']).replace('-', '_')}-{one.version}-{tag}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for file in _files(one):
                archive.write(str(one.locate_file(file)), str(file))
    return folder


def _files(one: Distribution) -> list[Path]:
    """What is installed among the packages; not scripts, nor bytecode."""
    files = [Path(file) for file in one.files or ()]
    return [file for file in files if file.parts[0] != ".." and "__pycache__" not in file.parts]
