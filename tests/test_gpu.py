"""What only a device shows. These tests run on a machine with a GPU: ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch

from processes import bits, losses, worldsize

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
    """train(name, *settings) trains a few steps on the GPU and returns the run folder."""
    cwd = tmp_path_factory.mktemp("gpu")

    def run(name: str, *settings: str, code: int = 0):
        done = worldsize(*SETTINGS, "--name", name, *settings, cwd=cwd)
        assert done.returncode == code, done.stdout + done.stderr
        return cwd / "runs" / name

    return run


def test_a_run_equals_the_same_run_on_a_cpu(train):
    gpu, cpu = train("fp64", "--precision", "fp64"), train("cpu", "--precision", "fp64", "--device", "cpu")
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-8)


@pytest.mark.parametrize(("name", "tolerance"), [("fp32", 1e-4), ("tf32", 1e-2), ("bf16", 5e-2), ("fp16", 5e-2)])
def test_number_formats_agree_with_fp64(train, name, tolerance):
    expected = losses(train("expected", "--precision", "fp64", "--max-steps", "3"))
    assert losses(train(name, "--precision", name, "--max-steps", "3")) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_deterministic_run_resumes_bit_for_bit(train, tmp_path, precision):
    settings = ("--precision", precision, "--deterministic")
    whole = train(f"whole-{precision}", *settings)
    part = train(f"part-{precision}", *settings, "--stop-after", "5", code=75)
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


@pytest.mark.parametrize("name", ["alexnet", "vgg11"])
def test_a_network_without_deterministic_operations_is_refused(tmp_path, name):
    settings = ("--model.name", name, "--deterministic", "--max-steps", "1", "--data.train-crop-size", "256")
    done = worldsize("train", "imagenet", "--data.name", "synthetic", *settings, cwd=tmp_path)
    assert done.returncode == 64, done.stderr
    assert "leave out --deterministic" in done.stderr
