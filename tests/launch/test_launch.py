"""Local launchers: the reported cause of a failure is the first failure, and the port of asynchronous runs is reserved."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import api

from interruptions import start_until
from processes import environment, workers
from waiting import all_end, until
from worldsize.distributed.rank import LAUNCHED, LOCAL_LAUNCH
from worldsize.launch import agent_signals, entry_point, failure, local_async
from worldsize.launch.local import ERROR_VARIABLE, Outcome, cause
from worldsize.watchdog.process import is_alive

EXPECTED, INTERNAL = Outcome(64, "wrong"), Outcome(70, "lost a peer")


@pytest.mark.parametrize(
    ("exit_codes", "reports", "code"),
    [
        ({0: 64, 1: -15}, [(99.0, EXPECTED)], 64),
        ({0: 64, 1: 64}, [(98.0, EXPECTED), (99.0, INTERNAL)], 64),
        ({0: 64, 1: -9}, [(99.0, EXPECTED)], 64),
        ({0: 70, 1: -9}, [(99.0, INTERNAL)], 137),
        ({0: 70, 1: -9}, [(60.0, INTERNAL)], 70),
        ({0: -15, 1: -11}, [], 139),
        ({0: -15, 1: 3}, [], 3),
        ({0: -6, 1: -9, 2: -6}, [], 137),
        ({0: -6, 1: -15}, [], 134),
    ],
)
def test_the_cause_of_a_failure(exit_codes, reports, code):
    assert cause(exit_codes, reports, now=100.0).code == code


def test_nobody_gets_the_port_of_an_asynchronous_run_before_rank_0_listens(monkeypatch):
    ports = []

    def rank(argv, number, processes, port, logs):
        ports.append(port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        if number == 0:
            socket.create_server(("", port)).close()  # with SO_REUSEADDR, as torch does
        return subprocess.Popen(["true"])

    monkeypatch.setattr(local_async, "_start", rank)
    assert local_async.launch(["train"], 2) == Outcome(0)
    assert len(set(ports)) == 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_process_that_dies_ends_the_others_only_until_training_begins(tmp_path, monkeypatch, begun):
    pids, died = [], tmp_path / "died"

    def rank(argv, number, processes, port, logs):
        (logs / str(number)).mkdir()
        work = {
            0: f"touch {logs}/begun; until [ -e {died} ]; do sleep 0.01; done" if begun else "exec sleep 600",
            1: f"until [ {int(begun)} = 0 -o -e {logs}/begun ]; do sleep 0.01; done; kill -KILL $$",
            2: f"while kill -0 {pids[-1] if pids else 0}; do sleep 0.01; done; touch {died}; exec sleep 600",
        }
        process = subprocess.Popen(["sh", "-c", work[number]])
        pids.append(process.pid)
        return process

    monkeypatch.setattr(local_async, "_start", rank)
    monkeypatch.setattr(local_async, "_EXIT_TIMEOUT_S", 0)
    outcome = local_async.launch(["train"], 3)
    assert outcome.code == (0 if begun else 128 + signal.SIGKILL)
    assert outcome.message.startswith("" if begun else "rank 1 was killed by SIGKILL")
    all_end(pids)


@pytest.fixture
def group(monkeypatch):
    """A process group of this process alone."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_process_leaves_its_group_before_it_fails_with_the_others(group, capsys):
    """Python aborts if it exits while a thread of the group releases tensors."""
    assert failure.fail("wrong", 64) == 64
    assert not dist.is_initialized()
    assert failure.fail("wrong", 64) == 64


def test_a_process_that_cannot_leave_its_group_ends_at_once(group, monkeypatch, capsys):
    ends, never = [], threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", never.wait)
        patch.setattr(failure, "_LEAVE_S", 0.01)
        patch.setattr(failure.os, "_exit", ends.append)
        failure.fail("wrong", 64)
    never.set()
    assert ends == [64]
    assert capsys.readouterr().err == "worldsize: wrong\n"


def test_only_the_first_signal_interrupts_and_a_later_one_ends_all(tmp_path, monkeypatch):
    now, ends = [100.0], []
    monkeypatch.setattr(agent_signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(agent_signals.os, "_exit", ends.append)
    (tmp_path / "logs").mkdir()
    before = api._terminate_process_handler
    with agent_signals.interrupting_once(tmp_path / "logs"):
        handle = api._terminate_process_handler
        with pytest.raises(api.SignalException):
            handle(signal.SIGTERM, None)
        now[0] += 1
        handle(signal.SIGHUP, None)  # of the same process tree
        assert ends == [] and (tmp_path / "logs").exists()
        now[0] += 1
        handle(signal.SIGINT, None)
    assert ends == [130] and not (tmp_path / "logs").exists()
    assert api._terminate_process_handler is before


def test_no_worker_outlives_a_launcher_that_ends_at_once(tmp_path):
    """Not even one that does not answer: who waits for the launcher may delete the folder that the workers write to."""
    process = start_until(tmp_path, "a", 2, 2)
    pids = workers(process.pid)
    os.kill(pids[1], signal.SIGSTOP)

    def ended() -> bool:
        process.send_signal(signal.SIGTERM)  # the launcher takes one soon after the first for the same
        return process.poll() is not None

    until(ended, "the launcher has ended", 60)
    assert [pid for pid in pids if is_alive(pid)] == [] and process.returncode == 128 + signal.SIGTERM


def test_a_report_that_cannot_be_written_is_printed(tmp_path, monkeypatch, capsys):
    """Without file descriptors or disk space, the launcher cannot read why a process ended."""
    for name in (*LAUNCHED, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(LOCAL_LAUNCH, "2")
    monkeypatch.setenv(ERROR_VARIABLE, str(tmp_path / "none" / "error.json"))
    closed = []
    monkeypatch.setattr(os, "close", closed.append)
    assert failure.fail_alone("too many open files", 69) == 69
    assert capsys.readouterr().err == "worldsize: too many open files\n"
    assert closed == [0]  # which may have made room for the report
    monkeypatch.setenv(ERROR_VARIABLE, str(tmp_path / "error.json"))
    failure.fail_alone("too many open files", 69)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("ignored", "code"), [(False, -signal.SIGINT), (True, 0)])
def test_ctrl_c_during_a_workers_imports_ends_it_without_a_traceback(tmp_path, ignored, code):
    """Except a process that was started to ignore it, as by ``nohup``."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "slow.py").write_text(
        "import sys\nprint('importing', flush=True)\nsys.stdin.read()\ndef main(words): return 0\n"
    )
    (tmp_path / "signal.py").write_text("raise AssertionError('the working folder is imported from')\n")
    worker = subprocess.Popen(
        entry_point.worker(sys.executable, "slow"), cwd=tmp_path, env=environment(PYTHONPATH=str(tmp_path / "path")),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler),
    )  # fmt: skip
    assert worker.stdout.readline() == "importing\n"
    worker.send_signal(signal.SIGINT)
    assert worker.communicate(timeout=60)[1] == ""
    assert worker.returncode == code
