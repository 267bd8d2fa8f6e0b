from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the module's finished run, for tests that change it."""
    return Path(shutil.copytree(finished, tmp_path / "copies" / "finished"))
