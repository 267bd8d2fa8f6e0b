"""A run that a process trains is not replaced on a volume, nor by a download."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_files_of_runs import WAYS, copy_from, make_run

from processes import environment
from trees import snapshot
from worldsize.cluster.storage import placing

HOLDS = """
import sys
from pathlib import Path
from worldsize.runs.run_lock import RunLock

with RunLock() as lock:
    lock.acquire(Path(sys.argv[1]))
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def trained(run: Path) -> Iterator[None]:
    """Within this context, another process has the lock of the run."""
    command = [sys.executable, "-c", HOLDS, str(run / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield
        process.stdin.close()
        assert process.wait(480) == 0


@WAYS
def test_a_run_in_training_is_not_replaced(tmp_path, way):
    source, old = make_run(tmp_path / "a/e1", 48, 72), make_run(tmp_path / "b/e1", 24, 48)
    with trained(old):
        before = {name: kept for name, kept in snapshot(old).items() if name != "lock"}
        with pytest.raises(placing.Failed, match=r"e1 is being trained, .* Nothing was changed") as refused:
            copy_from(source, tmp_path / "b", way)
        assert refused.value.user_error
        assert {name: kept for name, kept in snapshot(old).items() if name != "lock"} == before
    copy_from(source, tmp_path / "b", way)
    assert snapshot(old) == snapshot(source)


def test_where_locks_do_not_reach_a_record_that_changes_shows_a_training(tmp_path):
    run, ended = make_run(tmp_path / "e1", 24), threading.Event()

    def beat() -> None:
        with open(run / "lock", "r+b", buffering=0) as file:
            for beats in itertools.count(1):
                if ended.wait(0.05):
                    return
                os.pwrite(file.fileno(), b'{"beats": %d}' % beats, 0)

    (run / "lock").write_text('{"beats": 0}')
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert placing.is_trained(run)
    finally:
        ended.set()
        thread.join()


def test_what_a_killed_training_or_a_copy_left_is_no_training(tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "_WATCHED_S", 1.0)
    run = make_run(tmp_path / "e1", 24)
    assert not placing.is_trained(run)
    for text in ("", '{"beats": 3}'):
        (run / "lock").write_text(text)
        assert not placing.is_trained(run)
