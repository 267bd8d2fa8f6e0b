"""What a researcher archives next to a run's numbers: the code that computed them, and everything that is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

import worldsize

# The Dockerfile sets it to the hash of everything in the image that comes from us.
CONTENT = "WORLDSIZE_CONTENT"
_GIT_S = 10


def describe(command: str) -> dict[str, Any]:
    """``commit`` of worldsize (None: unknown), the ``command``, all ``packages`` with versions, and the ``container``.

    ``container`` is the hash of the image's content that is also in its tag; None outside of our images.
    """
    return {
        "commit": _commit(),
        "command": command,
        "packages": _packages(),
        "container": os.environ.get(CONTENT) or None,
    }


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for one in distributions():
        # Its `metadata` would parse the whole file, in which a description of thousands of lines follows the head.
        head = (one.read_text("METADATA") or one.read_text("PKG-INFO") or "").partition("\n\n")[0]
        name, version = (re.search(rf"^{field}: *(.+)", head, re.M) for field in ("Name", "Version"))
        if name and version:
            found.setdefault(name[1].strip(), version[1].strip())  # the first on the path is the one that is imported
    return dict(sorted(found.items()))


def _commit() -> str | None:
    """Of the checkout, with ``+changes`` if its files differ; or of the repository that pip installed from."""
    source = Path(worldsize.__file__).parent
    if (commit := _git(source, "rev-parse", "HEAD")) is not None and _git(source, "ls-files", "--", "__init__.py"):
        return commit + ("+changes" if _git(source, "status", "--porcelain", "--", ".") else "")
    try:
        installed = json.loads(distribution("worldsize").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    commit = installed.get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None


def _git(folder: Path, *words: str) -> str | None:
    """The output of git; None if it is missing or fails, such as outside of a repository."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
