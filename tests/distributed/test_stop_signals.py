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
