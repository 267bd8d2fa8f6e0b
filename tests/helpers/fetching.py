"""Helpers for the tests of fetching: archives of images, and fetches of them."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from worldsize.data.fetch import command
from worldsize.data.fetch.state import FOLDER

# Runs `worldsize data fetch` in a separate process.
COMMAND = """
import sys
import tyro
from worldsize.data.fetch import command
from worldsize.errors import WorldsizeError
try:
    sys.exit(command.run(tyro.cli(command.Fetch, args=sys.argv[1:])))
except WorldsizeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

# So that it has not unpacked everything before a test does something to it.
UNHURRIED = """
import time
save = command.FetchState.save
command.FetchState.save = lambda state: (save(state), time.sleep(1.0 if state.unpacked else 0.0))
try:
"""


def pack(tree: Path, archive: Path) -> Path:
    """An archive of all files below ``tree``; the file name determines the format."""
    files = sorted(path for path in tree.rglob("*") if path.is_file())
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
            for path in files:
                out.write(path, path.relative_to(tree))
    else:
        with tarfile.open(archive, f"w:{archive.suffix.lstrip('.').replace('tar', '')}") as tar:
            for path in files:
                tar.add(path, path.relative_to(tree))
    return archive


def contents(root: Path) -> dict[str, bytes]:
    """Contents of every file in the tree, except the fetch's state folder."""
    paths = (path for path in root.rglob("*") if path.is_file() and FOLDER not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def fetched(source: Path | str, to: Path, dataset="folder", **options) -> int:
    return command.run(command.Fetch(dataset, to, str(source), **options))


def start(source: Path | str, to: Path) -> subprocess.Popen:
    """Fetch in a process of its own, which takes its time from the first unpacked files on."""
    program = COMMAND.replace("try:\n", UNHURRIED, 1)
    command = [sys.executable, "-c", program, "folder", "--to", str(to), "--from", str(source)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def state(root: Path) -> dict:
    try:
        return json.loads((root / FOLDER / "state.json").read_text())
    except FileNotFoundError:
        return {}
