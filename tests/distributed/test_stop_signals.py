"""Signal handling that can be tested without training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from processes import environment
from worldsize.distributed import stop_signals

PROGRAM = """
import os, signal, subprocess, time
from worldsize.distributed.stop_signals import StopFlag

stop, handled, seen = StopFlag(), [], []
stop._handle = handled.append
stop.install()
signal.signal(signal.SIGCHLD, lambda *_: seen.append(1))  # as torch's DataLoader does
subprocess.run(["true"])
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
while signal.SIGTERM not in handled:  # signals arrive there in order
    time.sleep(0.01)
print([int(number) for number in handled], seen)
"""


def test_signals_to_stop_are_handled_and_the_end_of_a_child_is_none():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=480, env=environment())
    assert (done.returncode, done.stdout) == (0, "[10, 15] [1]\n"), done.stderr


def interrupted() -> None:
    """Clean up after a first signal, while two more arrive."""
    with stop_signals.interruptible("stopped"):
        assert not stop_signals.hurried()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            assert not stop_signals.hurried()
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop_signals.hurried()


def test_signals_after_the_first_do_not_interrupt_the_cleanup():
    with pytest.raises(stop_signals.Interrupted) as caught:
        interrupted()
    assert caught.value.number == signal.SIGTERM and caught.value.__context__ is None
    with stop_signals.interruptible("stopped"):
        assert not stop_signals.hurried()


HOLDS_A_FOLDER = """
import signal, subprocess, sys, time
from worldsize.distributed.stop_signals import temporary_folder

with temporary_folder() as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    while True: time.sleep(0.01)  # `signal.pause` would miss a signal that arrives just before it
"""
FORKS = """
import os, signal, time
from worldsize.distributed.stop_signals import temporary_folder

with temporary_folder() as folder:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, b"x")
        while True: time.sleep(0.01)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), folder.exists())
print(folder.exists(), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_that_ends_a_process_removes_its_temporary_folders(number, tmp_path):
    command, env = [sys.executable, "-c", HOLDS_A_FOLDER], environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
        assert [str(path) for path in tmp_path.iterdir()] == [folder]
        process.send_signal(number)
        assert process.wait(480) == -number
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_forked_process_leaves_the_folders_of_its_parent():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=480, env=environment())
    assert (done.returncode, done.stdout) == (0, "-15 True\nFalse True\n"), done.stderr


ENDS_AT_ONCE = """
import time
from worldsize.distributed.stop_signals import ends_at_once, temporary_folder

with ends_at_once("nothing was changed", continues={continues}), temporary_folder():
    print("begun", flush=True)
    while True: time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("continues", [True, False])
def test_the_code_of_a_command_that_ends_at_once_says_whether_it_continues(number, continues, tmp_path):
    command, env = [sys.executable, "-c", ENDS_AT_ONCE.format(continues=continues)], environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.communicate(timeout=480)[1] == "\nworldsize: stopped; nothing was changed\n"
    assert process.returncode == (75 if continues else 128 + number)
    assert list(tmp_path.iterdir()) == []
