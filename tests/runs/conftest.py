from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from three_steps import THREE_STEPS
from worldsize import cli


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of 3 steps with checkpoints after the last two; do not modify."""
    out = tmp_path_factory.mktemp("trained")
    assert cli.main(["train", "digits", *THREE_STEPS, "--out", str(out), "--name", "a"]) == 0
    return out / "a"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the trained run, for tests that damage it."""
    return Path(shutil.copytree(trained, tmp_path / "some" / "a"))
