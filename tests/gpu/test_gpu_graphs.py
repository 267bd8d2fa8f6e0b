"""Steps as CUDA graphs on a GPU: ``pytest -m gpu``. What needs none is in test_cuda_graph.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from processes import losses, records, worldsize
from worldsize.training import cuda_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU on this machine"),
]
# A learning rate that float32 represents, as a graph has it; otherwise training drifts apart.
SETTINGS = (
    *("train", "digits", "--max-steps", "8", "--schedule.name", "constant", "--optimizer.lr", str(2**-10)),
    *("--schedule.warmup-epochs", "0", "--data.train-crop-size", "32", "--data.val-resize-size", "32"),
    *("--data.val-crop-size", "32"),
)


def trained(cwd: Path, name: str, *settings: str) -> Path:
    done = worldsize(*SETTINGS, "--name", name, *settings, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd / "runs" / name


COMPILED = ("--model.name", "resnet18", "--precision", "bf16", "--micro-batch", "16")


def test_the_steps_of_a_compiled_network_are_captured_by_default(tmp_path):
    graphs = trained(tmp_path, "graphs", *COMPILED)
    assert json.loads((graphs / "environment.json").read_text())["cuda_graphs"]
    assert not (graphs / "log.txt").exists() or "CUDA graphs" not in (graphs / "log.txt").read_text()
    # A compiler that loses gradients, as torch 2.11's did in fp32, computes the right losses of the first step.
    plain = trained(tmp_path, "plain", *COMPILED, "--model.no-compile")
    norms = [records(run, "step")[0]["grad_norm"] for run in (graphs, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=5e-2)


def test_captured_steps_of_a_compiled_network_have_the_bits_of_its_kernels(tmp_path):
    """Only with deterministic kernels: in bf16, runs with others differ by a percent after few steps."""
    settings = (*COMPILED, "--model.compile", "--deterministic")
    kernels = trained(tmp_path, "kernels", *settings, "--no-cuda-graphs")
    graphs = trained(tmp_path, "graphs", *settings, "--cuda-graphs")
    assert losses(graphs) == losses(kernels)


def test_a_graph_draws_new_random_numbers_in_each_step(tmp_path):
    """Those of plain steps: the seed of a step enters the graph before it is replayed."""
    settings = ("--model.name", "mobilenet_v3_small", "--precision", "fp32", "--deterministic")
    kernels = trained(tmp_path, "kernels", *settings)
    graphs = trained(tmp_path, "graphs", *settings, "--cuda-graphs")
    assert losses(graphs) == pytest.approx(losses(kernels), rel=1e-3)


@pytest.mark.parametrize("waits", [False, True])
def test_what_waits_for_the_gpu_is_not_captured(waits, caplog):
    device = torch.device("cuda", torch.cuda.current_device())

    def work(x: torch.Tensor) -> torch.Tensor:
        return x * (x.max().item() if waits else x.max())

    graphed = cuda_graph.Graphed(work, device, cautious=True)
    results = [graphed(torch.full((4,), float(i), device=device)).sum().item() for i in range(6)]
    assert results == [4 * i * i for i in range(6)]
    assert (graphed._graph is None) == waits
    assert ("makes the host wait for the GPU" in caplog.text and "test_gpu_graphs.py" in caplog.text) == waits
