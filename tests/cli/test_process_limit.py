"""What a command says if the system lets it start no further thread or process."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from worldsize import cli
from worldsize.errors import Unavailable


def thread_without_room() -> None:
    """Python's own error: there is no room for this stack."""
    before = threading.stack_size(2**46)
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


@pytest.mark.parametrize("start", [thread_without_room, thread_of_torch, no_fork])
def test_the_limit_and_the_remedy_are_named(start, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_run", lambda _words: start())
    assert cli.main(["train"]) == Unavailable.exit_code
    printed = capsys.readouterr().err
    assert printed.startswith("worldsize: cannot start another thread or process: ")
    assert "ulimit -u" in printed
    assert printed.count("\n") == 1
