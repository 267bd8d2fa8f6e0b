"""Power, utilization and memory of GPUs: nvidia-ml-py as it is, with a small NVML of our own below it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scaled import CONSTANT, record
from worldsize.bench.scaling import measured, table
from worldsize.bench.scaling.cases import Case
from worldsize.training.device_usage import DeviceUsage, of_all

READ = """
import itertools, json, sys
from types import SimpleNamespace
import torch
from worldsize.training import device_usage

clock = itertools.count()
device_usage.time = SimpleNamespace(perf_counter=lambda: 0.5 * next(clock))
torch.cuda.max_memory_allocated = lambda device: 3_000_000_000
for uuid in sys.argv[1:]:
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuid)
    used = device_usage.DeviceUsage(torch.device("cuda", 0))
    print(json.dumps([used.take().tolist(), used.take().tolist()]))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_power_is_the_energy_since_the_last_reading(tmp_path):
    library = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(tmp_path / "libnvidia-ml.so.1")]
    subprocess.run(["gcc", *library, str(Path(__file__).parent / "nvml.c")], check=True)
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", READ, "second", "first", "slice"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    second, first, unknown = map(json.loads, done.stdout.splitlines())
    assert second == [[500.0, 0.75, 3.0]] * 2  # 250 J in each half second; torch has device 0 where NVML has GPU 1
    assert first[0][::2] == [500.0, 3.0] and math.isnan(first[0][1])  # it does not know
    assert all(math.isnan(value) for value in unknown[0][:2])


def test_without_nvml_only_the_memory_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2_000_000_000)
    taken = DeviceUsage(torch.device("cuda", 0)).take()
    assert of_all(taken.view(1, 3)) == {"gpu_watts": None, "gpu_busy": None, "gpu_memory_gb": 2.0}


def test_a_benchmark_shows_what_a_watt_hour_buys():
    ranks = torch.tensor([[300.0, 0.5, 2.0], [420.0, 0.9, 3.0]], dtype=torch.float64)
    used = of_all(ranks)
    assert used == {"gpu_watts": 720.0, "gpu_busy": 0.7, "gpu_memory_gb": 3.0}
    steps = [record(100, 0, 0, [100.0] * 2) | used] * 3  # 640 images/s
    one = measured.of_steps(Case("ddp", "weak", 1, 2), 1, CONSTANT, steps, 1, 2)
    assert one.images_per_wh == pytest.approx(640 * 3600 / 720)
    heading, _, row = table.table([one]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")][-5:-1] for line in (heading, row)]
    assert cells == [["GPU busy", "memory, GB", "power, W", "images/Wh"], ["0.7", "3", "720", "3200"]]
    without = measured.of_steps(Case("ddp", "weak", 1, 2), 1, CONSTANT, [record(100, 0, 0, [100.0] * 2)] * 3, 1, 2)
    assert without.images_per_wh is None and "GPU" not in table.table([without])
