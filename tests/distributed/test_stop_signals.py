"""Signal handling that can be tested without training."""

from __future__ import annotations

import subprocess
import sys

from processes import environment

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
