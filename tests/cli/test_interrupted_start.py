"""Ctrl-C while a command is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment

# Python imports it before the command. It waits in the import of one module, and says so.
WAITS = """
import os, sys
class Waiting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == os.environ["WAITS_AT"]:
            print("waiting", flush=True)
            sys.stdin.read()
sys.meta_path.insert(0, Waiting)
"""
SCRIPT = "import sys; from worldsize.__main__ import main; sys.exit(main())"  # as pip installs it


def start(folder: Path, module: str, how: tuple[str, ...], before: signal.Handlers | None = None) -> subprocess.Popen[str]:
    """Start ``worldsize recipes`` and wait until it imports the module."""
    (folder / "sitecustomize.py").write_text(WAITS)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, *how, "recipes"],
        env=environment(PYTHONPATH=path, WAITS_AT=module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, before or signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    return process


@pytest.mark.parametrize("how", [("-m", "worldsize"), ("-c", SCRIPT)])
@pytest.mark.parametrize("module", ["worldsize.cli", "worldsize.cli.usage", "worldsize.launch.failure"])
def test_ctrl_c_during_the_imports_ends_the_command_silently(tmp_path, module, how):
    with start(tmp_path, module, how) as process:
        process.send_signal(signal.SIGINT)
        said, failed = process.communicate(timeout=240)
    assert (process.returncode, said, failed) == (-signal.SIGINT, "", "")  # 130 in a shell


def test_ctrl_c_after_the_imports_is_the_command_s_own(tmp_path):
    """One that has begun says what it did."""
    with start(tmp_path, "worldsize.config.listing", ("-m", "worldsize")) as process:
        process.send_signal(signal.SIGINT)
        _, failed = process.communicate(timeout=240)
    assert (process.returncode, failed) == (130, "worldsize: interrupted; nothing was done\n")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path):
    """As of commands that a shell starts in the background."""
    with start(tmp_path, "worldsize.cli", ("-m", "worldsize"), signal.SIG_IGN) as process:
        process.send_signal(signal.SIGINT)
        said, failed = process.communicate(timeout=240)
    assert (process.returncode, failed) == (0, "")
    assert "imagenet" in said
