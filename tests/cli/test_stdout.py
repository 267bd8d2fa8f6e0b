"""What becomes of a command when nobody reads what it prints, or a disk takes no more."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paths import SMALL_NETWORK
from processes import environment
from worldsize import cli
from worldsize.errors import SIGNAL_BASE, UserError

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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", ["--help", "runs", "recipes digits"])
def test_a_full_disk_under_the_output_is_no_internal_error(trained, words):
    with open("/dev/full", "w") as full:
        done = ended(trained[0], full.fileno(), *words.split())
    assert (done.returncode, done.stderr) == (UserError.exit_code, "worldsize: cannot write: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "words",
    [
        "report runs/a --out /dev/full",
        "predict runs/a --results-file /dev/full",
        "predict runs/a --format csv --results-file /dev/full",
        "predict runs/a --sheet /dev/full",
    ],
)
def test_the_message_of_a_full_disk_names_the_file(trained, words):
    done = ended(trained[0], subprocess.DEVNULL, *words.split())
    assert done.returncode == UserError.exit_code
    assert done.stderr.splitlines()[-1] == "worldsize: cannot write /dev/full: No space left on device"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out/model.onnx"), "out/model.onnx: No space left on device"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot write: Read-only file system"),
        (RuntimeError("I/O error: No space left (os error 28)"), "cannot write: I/O error: No space left (os error 28)"),
        (
            PermissionError(errno.EACCES, "Permission denied", "runs/a/recipe.yaml"),
            "runs/a/recipe.yaml: Permission denied; check its permissions and those of its folder",
        ),
    ],
)
def test_what_a_disk_or_permissions_refuse_is_no_internal_error(monkeypatch, capsys, error, said):
    def fail(_words):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["export"]) == UserError.exit_code
    assert capsys.readouterr().err == f"worldsize: {said}\n"


def in_bash(script: str, *words: str, cwd: Path) -> int:
    """The exit code of Python with these arguments, as "$@" of a script."""
    command = ["bash", "-c", script, "-", sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=environment(), check=False).returncode


CLOSED = {"all": "<&- >&- 2>&-", "input": "<&-", "output": ">&-", "errors": "2>&-"}


@pytest.mark.parametrize("closed", CLOSED)
def test_a_command_works_with_closed_streams(closed, tmp_path):
    """As in some daemons. So do the processes that it starts: no file of theirs gets the number of a stream."""
    seen = "import sys; open('seen', 'w').write(str(None in (sys.stdin, sys.stdout, sys.stderr)))"
    child = [sys.executable, "-c", seen]
    words = f"import subprocess; from worldsize import cli; cli.main(); subprocess.run({child}, check=True)"
    assert in_bash(f'exec "$@" {CLOSED[closed]}', "-c", words, "runs", ".", cwd=tmp_path) == 0
    assert (tmp_path / "seen").read_text() == "False"


def test_a_run_trains_with_closed_streams(tmp_path):
    words = ("-m", "worldsize", "train", "digits", *QUICK, "--micro-batch", "4", "--procs", "2", "--name", "a")
    assert in_bash(f'exec "$@" {CLOSED["all"]}', *words, cwd=tmp_path) == 0
    assert (tmp_path / "runs" / "a" / "result.json").is_file()


@pytest.mark.parametrize(("width", "words", "shown"), [("0", "strategies", "localsgd"), ("1", "train --help", "--seed")])
def test_what_is_no_width_is_ignored(tmp_path, width, words, shown):
    """Tables were empty, and the help text had no end."""
    command, variables = [sys.executable, "-m", "worldsize", *words.split()], environment(COLUMNS=width)
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
