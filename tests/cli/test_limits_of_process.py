"""What a command says if the system gives it no more memory, threads or processes."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from processes import environment
from worldsize import cli
from worldsize.errors import INTERNAL_ERROR, Unavailable, no_memory


def thread_without_room() -> None:
    """Python's own error: there is no room for this stack."""
    before = threading.stack_size(2**62)
    try:
        threading.Thread(target=print).start()
    finally:
        threading.stack_size(before)


def thread_of_torch() -> None:
    """As `torch.distributed` raises it while its store or gloo starts threads."""
    raise RuntimeError("Resource temporarily unavailable")


def no_fork() -> None:
    """As `subprocess` raises it."""
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def no_memory_for_python() -> None:
    bytearray(2**60)


def no_memory_for_torch() -> None:
    torch.empty(2**60, dtype=torch.uint8).fill_(1)


PROCESSES = ("cannot start another thread or process: ", "ulimit -u")
MEMORY = ("out of memory: ", "ulimit -v")


@pytest.mark.parametrize(
    ("work", "limit", "remedy"),
    [
        (thread_without_room, *PROCESSES),
        (thread_of_torch, *PROCESSES),
        (no_fork, *PROCESSES),
        (no_memory_for_python, *MEMORY),
        (no_memory_for_torch, *MEMORY),
    ],
)
def test_the_limit_and_the_remedy_are_named(work, limit, remedy, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_run", lambda _words: work())
    assert cli.main(["train"]) == Unavailable.exit_code
    printed = capsys.readouterr().err
    assert printed.startswith(f"worldsize: {limit}")
    assert remedy in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("error", ["SystemError('error return without exception set')", "RuntimeError('no operator')"])
@pytest.mark.parametrize(("room", "code"), [(2**20, Unavailable.exit_code), (2**40, INTERNAL_ERROR)])
def test_an_import_that_fails_at_the_limit_of_memory_is_not_an_internal_error(
    error, room, code, monkeypatch, tmp_path, capsys
):
    """As of libraries that lose the MemoryError. With room left, it is another fault."""
    (tmp_path / "library_without_room.py").write_text(f"raise {error}\n")
    used = 1024 * int(Path("/proc/self/status").read_text().split("VmPeak:")[1].split()[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cli, "_run", lambda _words: importlib.import_module("library_without_room"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + room, resource.RLIM_INFINITY))
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err.startswith("worldsize: out of memory: ") == (code == Unavailable.exit_code)


def test_a_long_message_is_reduced_to_the_line_about_memory():
    """NumPy puts advice before the dynamic linker's message."""
    found = no_memory(ImportError("\n\nREAD THIS\n\nOriginal error: x.so: failed to map segment from shared object\n"))
    assert found is not None
    assert found.startswith("out of memory: Original error: x.so: failed to map segment from shared object. Raise")


def test_a_limit_that_is_too_low_for_torch_is_named(tmp_path):
    """The dynamic linker cannot load its libraries."""
    command = ["bash", "-c", 'ulimit -v 400000; exec "$@"', "-", sys.executable, "-m", "worldsize", "train", "digits"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == Unavailable.exit_code
    assert "worldsize: out of memory: " in done.stderr
    assert "Traceback" not in done.stderr
