"""benchmarks/launches.py, step_launches.py and compiled_bytes.py: they run against the product as it is now."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from packing import encode, noise, packed
from paths import ROOT
from processes import environment
from trees import put


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(table: str) -> dict[str, list[str]]:
    """By the first cell of each row, the others."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {name: values for name, *values in cells}


@pytest.mark.slow
@pytest.mark.skipif(not os.sched_getaffinity(0) >= {0, 1}, reason="needs the cores 0 and 1")
def test_decoding_is_measured_next_to_launching(tmp_path):
    for i in range(140):
        put(tmp_path / "root" / "train" / "ab"[i % 2] / f"{i}.jpg", encode(noise(60, 50, i), "JPEG"))
    for label in "ab":
        put(tmp_path / "root" / "val" / label / "1.jpg", encode(noise(60, 50, 0), "JPEG"))
    packed(tmp_path / "root", tmp_path / "shards")
    found = rows(run("launches.py", tmp_path / "shards", "1"))
    assert float(found["in threads"][0].replace(",", "")) > 0 < float(found["in a process"][0].replace(",", ""))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_operations_of_a_step_are_counted():
    """A network of 53 BatchNorm layers; each is one operation forward and one backward, for each micro-batch."""
    found = rows(run("step_launches.py").split("thin network")[0])
    forms = ("one micro-batch", "8 micro-batches in a pass")
    one, eight = ([int(cell.replace(",", "")) for cell in found[name]] for name in forms)
    assert one[1] == 2 * 53 and eight[1] == 8 * 2 * 53
    # No more than what is known: the statistics of eight micro-batches, and sums of their gradients.
    assert one[0] < 800 and eight[0] < 2400


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiled_network_moves_about_the_bytes_of_the_bare_one():
    """In the same order of memory, too: kernels that read two orders took an H200 four times as long."""
    found = rows(run("compiled_bytes.py", "resnet18"))
    bare, one, four = (found[name] for name in ("bare", "1 micro-batch in a pass", "4 micro-batches in a pass"))
    assert bare[2] == "1.000" and float(one[2]) < 1.1 and float(four[2]) < 1.1
    assert one[4] == four[4] == bare[4]
