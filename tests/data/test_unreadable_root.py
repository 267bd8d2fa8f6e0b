"""A dataset or a run in a folder that this user may not enter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import environment

# Root may read everything, unless it gives up these capabilities.
AS_USER = ("setpriv", "--inh-caps", "-all", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


def as_user() -> bool:
    """Whether processes can run without the rights of root."""
    return not AS_USER or (
        shutil.which(AS_USER[0]) is not None
        and subprocess.run([*AS_USER, "true"], stderr=subprocess.DEVNULL).returncode == 0
    )


pytestmark = pytest.mark.skipif(not as_user(), reason="root can read everywhere")


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "closed"
    (folder / "train").mkdir(parents=True)
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


@pytest.mark.parametrize("words", ["data verify --root", "train imagenet --data.root", "init", "eval", "train --resume"])
def test_the_message_names_the_folder(closed: Path, words: str):
    """And no file in it, because nobody knows which it has."""
    command = [*AS_USER, sys.executable, "-m", "worldsize", *words.split(), closed.name]
    done = subprocess.run(command, cwd=closed.parent, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 64, done.stderr
    assert "closed: Permission denied" in done.stderr and "closed/" not in done.stderr
