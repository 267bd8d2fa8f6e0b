"""The product on fake CUDA tensors: each tensor on its device, and no hidden wait of the host for the GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from processes import HERE, environment

# The host may wait here, and nowhere else.
ALLOWED: dict[str, dict[str, int]] = {
    # The weights, each rank's own tensors and the optimizer's must be on the host before they are written.
    "snapshot": {"checkpoint.py:copy synchronize": 3},
}
STRATEGIES = [f"{precision} {name}" for name in ("bitwise", "adasum", "localsgd") for precision in ("bf16", "fp16")]
CASES = [f"{precision} {name}" for precision in ("fp32", "tf32", "bf16", "fp16") for name in ("sgd", "adamw")]


def run(**env: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "fake_gpu.py")]
    done = subprocess.run(command, env=environment(**env), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def partial() -> dict[str, Any]:
    """Everything but the backward pass."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests marked gpu use it")
    return run()


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With functions of torch's library replaced, so that the backward pass works too."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests marked gpu use it")
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("fake_gpu.so", "libcuda.so.1"):
        subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / name, HERE / "fake_gpu.c"], check=True)
    return run(LD_PRELOAD=str(folder / "fake_gpu.so"), LD_LIBRARY_PATH=str(folder))


def check(found: dict[str, list[str]]) -> None:
    assert set(found) == {"step", "evaluate", "snapshot", "step after restore"}
    for part, waits in found.items():
        assert dict(Counter(waits)) == ALLOWED.get(part, {}), part


def test_the_detector_finds_waits(partial):
    kinds = [wait.split()[-1] for wait in partial["known"]["operations"]]
    assert kinds == ["_to_copy", "_to_copy", "copy_", "_to_copy", "_local_scalar_dense"]


def test_every_batch_is_copied_once_and_in_order(partial):
    assert partial["fed"] == [[0, 1, 2]] * 4


@pytest.mark.parametrize("case", [*CASES, "ghost"])
def test_forward_and_update_wait_for_nothing(partial, case):
    check(partial[case])


@pytest.mark.parametrize("case", [*CASES, "ghost", *STRATEGIES])
def test_a_complete_step_waits_for_nothing(complete, case):
    check(complete[case])
