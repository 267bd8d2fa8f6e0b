"""A launcher at the limit of open files."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

from waiting import until
from worldsize.errors import unanswered
from worldsize.launch import unkillable


def test_reports_that_cannot_be_read_now_are_read_later(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(unkillable, "_POLL_S", 0.01)
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    calls: list[int] = []

    def reason() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.EMFILE, "Too many open files", str(tmp_path))

    with unkillable.not_waited_for(tmp_path, reason):
        until(lambda: failed or len(calls) > 1, "the reports are read again")
    assert not failed


def test_the_limit_of_open_files_has_a_remedy():
    assert unanswered(OSError(errno.EMFILE, "Too many open files", "f")) == (
        "f: Too many open files; raise the limit of open files (ulimit -n)"
    )
    assert unanswered(OSError(errno.EIO, "Input/output error", "f")) == "f: Input/output error"
