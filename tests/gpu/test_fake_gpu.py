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

STRATEGIES = [f"{precision} {name}" for name in ("ddp", "bitwise", "adasum", "localsgd") for precision in ("bf16", "fp16")]
STRATEGIES += ["ddp fp16", "ddp powersgd"]
GRAPHS = ["graphs bf16 cifarnet", "graphs bf16 sgd", "graphs fp16 sgd", "graphs fp16 adamw"]
OPTIMIZERS = [f"bf16 {name}" for name in ("rmsprop", "sgdw", "lars", "lamb", "muon", "nadamw", "lion")]
OPTIMIZERS += ["fp16 lars", "fp64 sgd", "sharpness", "clip value", "clip adaptive"]
CASES = ["fp32 sgd", "tf32 sgd", "bf16 adamw", "fp16 adamw", "ghost", "no prefetch"]
QUICK = ["bf16 sgd", "fp16 sgd", "mixed"]
ALL = [*QUICK, *CASES, *OPTIMIZERS, *GRAPHS, *STRATEGIES]


def run(cases: list[str], **env: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "fake_gpu.py"), *cases]
    done = subprocess.run(command, env=environment(**env), capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def partial() -> dict[str, Any]:
    """Everything but the backward pass."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests marked gpu use it")
    return run(QUICK)


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
    return run(ALL, LD_PRELOAD=str(folder / "fake_gpu.so"), LD_LIBRARY_PATH=str(folder))


# Waits that are known and wanted, and why. By part: the place, and the operation.
_SKIPS = {"step.py:_optimizer_step _local_scalar_dense": "fp16, not fused: torch reads whether to skip the step"}
ALLOWED = {
    "read": {
        "step_metrics.py:_read synchronize": "metrics are read one --track.every-seconds later, and before each save",
        "device_timer.py:elapsed_ms synchronize": "events that have passed by then",
    },
    "snapshot": {
        "margins.py:_packed _to_copy to cpu": "ranks exchange the losses of samples; the metrics before have waited",
        "saver.py:snapshot _local_scalar_dense": "the loss scale of fp16 is a number in state.json",
    },
    "step": _SKIPS,
    "step after restore": _SKIPS,
}


def test_the_weights_of_a_grant_are_copied_once(partial):
    assert partial["grant"]["operations"] == ["worker.py:unflatten _to_copy to cuda"]


def check(case: str, found: dict[str, list[str]]) -> None:
    assert set(found) == {"step", "collect", "read", "evaluate", "snapshot", "step after restore"}
    for part, waits in found.items():
        allowed = ALLOWED.get(part, {}).keys() - (set() if case == "fp16 lars" else _SKIPS.keys())
        assert {wait: count for wait, count in Counter(waits).items() if wait not in allowed} == {}, part


@pytest.mark.slow
def test_each_allowed_wait_exists(complete):
    """Otherwise the list would hide a wait that comes back."""
    for part, allowed in ALLOWED.items():
        assert allowed.keys() <= {wait for case in ALL for wait in complete[case][part]}


def test_the_detector_finds_waits(partial):
    kinds = [wait.removeprefix("elsewhere ") for wait in partial["known"]["operations"]]
    assert kinds == [
        *("_to_copy to cpu", "_to_copy to cuda", "copy_ to cuda", "_to_copy to cuda", "_to_copy to cuda"),
        "_local_scalar_dense",
    ]


def test_every_batch_is_copied_once_and_in_order(partial):
    assert partial["fed"] == [[0, 1, 2]] * 4


def test_a_process_copies_on_one_stream(partial):
    """All cases, feeds and snapshots."""
    assert partial["streams"] == 1


@pytest.mark.slow
def test_rehearsals_have_the_batch_of_training(complete):
    """cuDNN chooses its algorithms for it, and it shows whether it fits."""
    assert complete["rehearsed"] == [4]


@pytest.mark.parametrize("case", QUICK)
def test_forward_and_update_wait_for_nothing(partial, case):
    check(case, partial[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_a_complete_step_waits_for_nothing(complete, case):
    check(case, complete[case])
