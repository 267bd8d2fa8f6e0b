"""Commands whose parent ignored SIGCHLD, so that no exit code reaches them, or blocked the signals that stop a run."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from folders import folder_recipe, images
from paths import SMALL_NETWORK
from processes import environment
from waiting import until
from worldsize import cli
from worldsize.launch import entry_point

# What a parent does before it becomes the command.
IGNORES = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
BLOCKS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def started(parent: str, words: list[str], cwd: Path, module: str = "worldsize.cli") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", parent, *entry_point.command(sys.executable, module), *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=cwd, env=environment(), text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()  # its own processes end with it


def test_a_command_starts_as_from_a_shell():
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    nohup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli.main(["--version"]) == 0
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    finally:
        signal.signal(signal.SIGHUP, nohup)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGCHLD, ignored)


def test_a_failure_of_the_processes_is_one_of_their_launcher(tmp_path):
    root = images(tmp_path / "images", {"cat": 3}, {"cat": 3})
    with started(IGNORES, ["train", str(folder_recipe(tmp_path, root)), "--procs", "2"], tmp_path) as failed:
        said = failed.communicate(timeout=480)[0]
    assert (failed.returncode, said.count("has only one class")) == (64, 1), said


def test_a_failure_of_the_command_of_a_host_is_one_of_the_host(tmp_path):
    words = ["1", sys.executable, "-c", "raise SystemExit(3)"]
    with started(IGNORES, words, tmp_path, "worldsize.launch.lifeline") as failed:
        assert failed.stdin is not None
        failed.stdin.write("recipe 0\n")
        failed.stdin.flush()  # it stays open: the launcher lives
        assert failed.wait(timeout=240) == 3, failed.communicate()[0]


@pytest.mark.parametrize("procs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_saves_and_stops(tmp_path, procs):
    long = ("--model.name", SMALL_NETWORK, "--epochs", "1000", "--evaluate-every", "1000", "--track.every-seconds", "0")
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    with started(BLOCKS, ["train", "digits", *long, "--name", "a", "--procs", procs], tmp_path) as running:
        until(lambda: metrics.exists() and '"step", ' in metrics.read_text(), "a step is done", running=running)
        running.send_signal(signal.SIGTERM)
        said = running.communicate(timeout=240)[0]
    assert running.returncode == 75 and "the state is saved" in said, said
