"""A network that a program loads before it forks, as servers do that load first and then start their workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The child that hangs is ended by its alarm.
PROGRAM = """
import os, signal, sys
import torch
import worldsize
from PIL import Image

run, again = sys.argv[1], sys.argv[2] == "again"
images = [Image.new("RGB", (24, 20), (40 * i % 255, 90, 120)) for i in range(64)]
torch.set_num_threads(2)
model = worldsize.load(run, device="cpu")
expected = model.logits(images)
child = os.fork()
if child == 0:
    signal.alarm(120)
    found = (worldsize.load(run, device="cpu") if again else model).logits(images)
    os._exit(0 if torch.allclose(found, expected, atol=1e-2) else 3)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert torch.get_num_threads() == 2
assert torch.equal(model.logits(images), expected)
sys.exit(0 if code == 0 else f"the child ended with {code}")
"""


@pytest.mark.parametrize("which", ["the same", "again"])
def test_a_forked_process_predicts_with_the_network_of_its_parent(small_run: Path, which: str):
    words = [sys.executable, "-c", PROGRAM, str(small_run), which]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
