"""A signal that reaches the launcher after the work is done, or a process before it has begun."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing import api

from processes import start_sabotaged, worldsize
from three_steps import THREE_STEPS
from worldsize.launch import agent_signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_after_the_last_step_changes_nothing(tmp_path: Path, name: str):
    words = ("train", "digits", *THREE_STEPS, "--procs", "2", "--name", "a")
    process = start_sabotaged("late_signal", *words, cwd=tmp_path, LATE_SIGNAL=name)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert (tmp_path / "runs" / "a" / "result.json").is_file()


def test_a_signal_after_an_evaluation_changes_nothing(tmp_path: Path):
    assert worldsize("train", "digits", *THREE_STEPS, "--name", "a", cwd=tmp_path).returncode == 0
    words = ("eval", "runs/a", "--procs", "2")
    process = start_sabotaged("late_signal", *words, cwd=tmp_path, LATE_SIGNAL="SIGTERM")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "top-1" in said, said


@pytest.mark.parametrize(("alone", "code"), [(True, "0"), (True, "3"), (False, "0")])
def test_a_signal_when_all_workers_have_succeeded_is_ignored(tmp_path: Path, alone: bool, code: str):
    """Unless other agents take part, for which this one may wait long."""
    worker = subprocess.Popen(["sh", "-c", f"exit {code}"])
    worker.wait()
    with agent_signals.interrupting_once(tmp_path, alone) as workers:
        handle = api._terminate_process_handler
        assert not workers.succeeded()
        workers.group = SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=worker)})
        if alone and code == "0":
            handle(signal.SIGTERM, None)
        else:
            with pytest.raises(api.SignalException):
                handle(signal.SIGTERM, None)
