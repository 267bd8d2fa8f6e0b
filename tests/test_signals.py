"""Signal handling that can be tested without training."""

from __future__ import annotations

import subprocess
import sys

import pytest

from processes import environment

PROGRAM = """
import signal, subprocess, sys, time
from worldsize.signals import StopFlag

stop, seen = StopFlag(), []
stop.install()
if sys.argv[1] == "armed":
    stop.arm()
signal.signal(signal.SIGCHLD, lambda *_: seen.append(1))  # as torch's DataLoader does
subprocess.run(["true"])
time.sleep(0.5)
print(bool(stop), seen)
"""


@pytest.mark.parametrize("state", ["armed", "not armed"])
def test_the_end_of_a_child_is_no_signal_to_stop(state):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, state], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (done.returncode, done.stdout) == (0, "False [1]\n"), done.stderr
