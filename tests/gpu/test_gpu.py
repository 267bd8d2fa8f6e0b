"""What only a device shows. These tests run on a machine with a GPU: ``pytest -m gpu``.

Few cases, because each process needs seconds to start and `benchmarks/gpu.py` limits all of them together. One process
after the other, because one test fills the GPU.
"""

from __future__ import annotations

import pytest
import torch

from processes import bits, distance, losses, worldsize
from steps_of_ranks import weights_after

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU on this machine"),
]
SETTINGS = (
    *("train", "digits", "--model.name", "resnet18", "--max-steps", "12", "--optimizer.lr", "0.001"),
    *("--schedule.warmup-epochs", "0"),
)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(name, *settings) trains a few steps on the GPU, once for each name, and returns the run folder."""
    cwd = tmp_path_factory.mktemp("gpu")

    def run(name: str, *settings: str, code: int = 0):
        folder = cwd / "runs" / name
        if not folder.exists():
            done = worldsize(*SETTINGS, "--name", name, *settings, cwd=cwd)
            assert done.returncode == code, done.stdout + done.stderr
        return folder

    return run


def test_a_run_equals_the_same_run_on_a_cpu(train):
    gpu, cpu = train("fp64", "--precision", "fp64"), train("cpu", "--precision", "fp64", "--device", "cpu")
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-8)


@pytest.mark.parametrize(("ranks", "backend"), [(1, "nccl"), (2, "gloo"), (4, "gloo")])
def test_ddp_on_one_gpu_has_the_numbers_of_one_process(tmp_path, ranks, backend, monkeypatch):
    """NCCL with one process; with gloo, several share the GPU."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    expected = weights_after(1, "cuda:0", None, tmp_path / "expected")
    assert distance(weights_after(ranks, "cuda:0", backend, tmp_path / "ranks"), expected) < 1e-9


@pytest.mark.parametrize(("name", "tolerance"), [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 5e-2), ("fp16", 5e-2)])
def test_number_formats_agree_with_fp64(train, name, tolerance):
    expected = losses(train("fp64", "--precision", "fp64"))[:3]
    assert losses(train(name, "--precision", name, "--max-steps", "3")) == pytest.approx(expected, rel=tolerance)


def test_a_deterministic_run_resumes_bit_for_bit(train):
    settings = ("--precision", "fp16", "--deterministic")
    whole = train("whole", *settings)
    part = train("part", *settings, "--stop-after", "5", code=75)
    done = worldsize("train", "--resume", part, "--max-steps", "12", cwd=part.parents[1])
    assert done.returncode == 0, done.stderr
    assert bits(part) == bits(whole) and losses(part) == losses(whole)


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "sgd"), ("bf16", "adamw"), ("fp16", "sgd")])
def test_graphs_compute_what_single_kernels_do(train, precision, optimizer):
    settings = ("--precision", precision, "--optimizer.name", optimizer, "--deterministic", "--max-steps", "8")
    eager = train(f"eager-{precision}-{optimizer}", *settings)
    graphs = train(f"graphs-{precision}-{optimizer}", *settings, "--cuda-graphs")
    assert losses(graphs) == pytest.approx(losses(eager), rel=1e-3)


@pytest.mark.parametrize("more", [(), ("--cuda-graphs",)])
def test_the_copy_of_the_next_images_changes_nothing(train, more):
    settings = ("--deterministic", "--max-steps", "6", *more)
    ahead = train(f"ahead{len(more)}", *settings)
    assert losses(train(f"not-ahead{len(more)}", *settings, "--data.no-device-prefetch")) == losses(ahead)


def test_a_run_with_graphs_resumes_bit_for_bit(train):
    settings = ("--deterministic", "--cuda-graphs")
    whole = train("whole-graphs", *settings)
    part = train("part-graphs", *settings, "--stop-after", "5", code=75)
    done = worldsize("train", "--resume", part, "--max-steps", "12", cwd=part.parents[1])
    assert done.returncode == 0, done.stderr
    assert bits(part) == bits(whole) and losses(part) == losses(whole)


def test_large_forward_passes_equal_separate_ones(train):
    settings = ("--precision", "fp64", "--micro-batch", "16", "--forward-batch")
    assert losses(train("together", *settings, "64")) == pytest.approx(losses(train("separate", *settings, "16")), rel=1e-8)


def test_a_full_gpu_ends_the_run_with_a_batch_that_fits(tmp_path):
    settings = ("--data.name", "synthetic", "--data.samples", "65536", "--global-batch", "32768", "--micro-batch", "32768")
    done = worldsize("train", "imagenet", *settings, "--schedule.warmup-epochs", "0", "--max-steps", "1", cwd=tmp_path)
    assert done.returncode == 64, done.stderr
    assert "out of GPU memory" in done.stderr and "fits: add --micro-batch" in done.stderr


def test_a_network_without_deterministic_operations_is_refused(tmp_path):
    settings = ("--model.name", "vgg11", "--deterministic", "--max-steps", "1", "--data.train-crop-size", "256")
    done = worldsize("train", "imagenet", "--data.name", "synthetic", *settings, cwd=tmp_path)
    assert done.returncode == 64, done.stderr
    assert "leave out --deterministic" in done.stderr
