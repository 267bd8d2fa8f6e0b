"""What becomes of a command when nobody reads what it prints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paths import SMALL_NETWORK
from processes import environment
from worldsize.errors import SIGNAL_BASE

QUICK = ("--model.name", SMALL_NETWORK, "--max-steps", "2", "--global-batch", "8", "--micro-batch", "8")
READER_LEFT = SIGNAL_BASE + signal.SIGPIPE


def ended(cwd: Path, stdout: int, *words: str) -> subprocess.CompletedProcess[str]:
    """``worldsize WORDS`` with this file as stdout, which Python buffers as it does for users."""
    command = [sys.executable, "-m", "worldsize", *words]
    return subprocess.run(
        command, cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment(PYTHONUNBUFFERED=""), check=False
    )


def unread(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The same with a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return ended(cwd, writer, *words)
    finally:
        os.close(writer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder in which a run was trained whose output nobody read, and how it ended."""
    folder = tmp_path_factory.mktemp("unread")
    return folder, unread(folder, "train", "digits", *QUICK, "--name", "a")


def test_training_goes_on_without_its_reader(trained):
    folder, done = trained
    assert done.returncode == 0, done.stderr
    assert (folder / "runs" / "a" / "result.json").is_file()
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "runs --help",
        "recipes digits",
        "compare runs/a runs/a",
        "predict runs/a --procs 2",
    ],
)
def test_other_commands_end_with_their_reader(trained, words):
    done = unread(trained[0], *words.split())
    assert (done.returncode, done.stderr) == (READER_LEFT, "")
