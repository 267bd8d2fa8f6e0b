"""Commands that compute steps again do not run a network of code that this user has not trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import worldsize
from worldsize.config import recipe_files
from worldsize.config.recipe import own_network

CODE = """from pathlib import Path
from torch import nn

Path({!r}).touch()


def build(classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))
"""
TRAIN = ("--global-batch", "160", "--micro-batch", "40", "--precision", "fp32", "--schedule.warmup-epochs", "0")


def user(folder: Path) -> dict[str, str]:
    """The variables of a user who has not trained anything yet."""
    return {"XDG_STATE_HOME": str(folder)}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    """A run that somebody else has trained, in a folder where its code leaves the file ``ran``; do not modify."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "net.py").write_text(CODE.format(str(folder / "ran")))
    more = (*TRAIN, "--model.name", "net.py:build", "--max-steps", "2", "--name", "theirs")
    done = worldsize("train", "digits", *more, cwd=folder, **user(folder / "author"))
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "ran").unlink()
    return folder


@pytest.mark.parametrize("command", [("audit",), ("replay", "--step", "1")])
def test_it_runs_only_if_the_user_says_so_and_for_this_command_only(foreign, tmp_path, command):
    words = (command[0], "runs/theirs", *command[1:])
    done = worldsize(*words, cwd=foreign, **user(tmp_path))
    assert done.returncode == 64 and "you have not trained it on this machine" in done.stderr
    assert not (foreign / "ran").exists()
    source = recipe_files.load(str(foreign / "runs" / "theirs" / "recipe.yaml")).model.source
    assert source is not None
    allowed = {"WORLDSIZE_TRUST_CODE": own_network.fingerprint(source)}
    done = worldsize(*words, cwd=foreign, **user(tmp_path), **allowed)
    assert done.returncode == 0, done.stdout + done.stderr
    (foreign / "ran").unlink()
    assert worldsize(*words, cwd=foreign, **user(tmp_path)).returncode == 64
