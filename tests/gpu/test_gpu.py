"""What only a device shows. On a machine with a GPU: ``pytest -m gpu tests/gpu/test_gpu.py``.

Without one, the tests that need no GPU's features run on the CPU, as slow tests, so that they work there the first time.
`benchmarks/gpu.py` runs these tests within two minutes, so they train few steps, and share runs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from processes import HERE, bits, distance, environment, losses, records, worldsize
from steps_of_ranks import weights_after
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu, *([pytest.mark.slow] if DEVICE == "cpu" else [])]
# 16 bits are slow on a CPU, and so are large images.
HALF, SIZE = ("fp16", "32") if DEVICE == "cuda" else ("fp32", "16")
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="torch finds no GPU on this machine")
SETTINGS = (
    *("train", "digits", "--model.name", "resnet18", "--model.no-compile", "--max-steps", "6", "--optimizer.lr", "0.001"),
    *("--schedule.warmup-epochs", "0", "--data.train-crop-size", SIZE),
    *("--data.val-resize-size", SIZE, "--data.val-crop-size", SIZE),
)
RANKS = [pytest.param(1, "nccl", marks=needs_gpu), (1, "gloo"), (2, "gloo"), (4, "gloo")]
# The relative error of the first loss; each format computes less exactly than fp32.
FORMATS = [pytest.param("tf32", 1e-3, marks=needs_gpu), ("bf16", 1e-2), pytest.param("fp16", 1e-3, marks=needs_gpu)]
# Between fp32 (measured on a CPU: 4e-6) and formats of 10, 7 and 10 bits (1e-2, 2e-2 and 2e-3), for `differences`.
EXACT = 1e-4


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(name, *settings) trains a few steps on the device, once for each name, and returns the run folder."""
    cwd = tmp_path_factory.mktemp("gpu")

    def run(name: str, *settings: str, code: int = 0) -> Path:
        folder = cwd / "runs" / name
        if not folder.exists():
            device = () if "--device" in settings else ("--device", DEVICE)
            done = worldsize(*SETTINGS, "--name", name, *device, *settings, cwd=cwd)
            assert done.returncode == code, done.stdout + done.stderr
            (folder / "stdout.txt").write_text(done.stdout)
        return folder

    return run


@pytest.fixture(scope="module")
def reference(train):
    """The run in fp64, and one like it on the CPU."""
    return train("fp64", "--precision", "fp64")


def differences(run: Path, expected: Path) -> tuple[float, float]:
    """Relative differences of the first loss and of the norm of its gradient; infinite if that has overflowed.

    Later steps show little: training multiplies a difference of rounding by hundreds in each step.
    """
    (own, other) = (records(one, "step")[0] for one in (run, expected))
    norm = math.inf if own["grad_norm"] is None else abs(own["grad_norm"] / other["grad_norm"] - 1)
    return abs(own["loss"] / other["loss"] - 1), norm


# Numbers


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_and_its_evaluation_equal_the_same_on_a_cpu(train, reference, optimizer):
    settings = ("--precision", "fp64", "--optimizer.name", optimizer)
    gpu = reference if optimizer == "sgd" else train(f"fp64-{optimizer}", *settings)
    cpu = train(f"cpu-{optimizer}", *settings, "--device", "cpu")
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-8)
    own, expected = records(gpu, "epoch")[-1], records(cpu, "epoch")[-1]
    assert own["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-8)
    assert own["val_top1"] == expected["val_top1"] and own["val_samples"] == expected["val_samples"] > 300


def test_a_saved_network_is_evaluated_as_in_training(reference):
    done = worldsize("eval", reference, cwd=reference.parent)
    assert done.returncode == 0, done.stderr
    expected = records(reference, "epoch")[-1]
    assert f"top-1 {expected['val_top1']:.2%}" in done.stdout and f"loss {expected['val_loss']:.4f} on 360" in done.stdout


def test_fp32_is_exact(train, reference):
    """With TF32, torch's default in convolutions, it would not be."""
    assert 0 < max(differences(train("fp32", "--precision", "fp32"), reference)) < EXACT


@pytest.mark.parametrize(("name", "tolerance"), FORMATS)
def test_other_formats_are_what_they_are_called(train, reference, name, tolerance):
    run = train(name, "--precision", name)
    assert max(differences(run, train("fp32", "--precision", "fp32"))) > EXACT
    assert differences(run, reference)[0] < tolerance


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-8), pytest.param("bf16", 2e-2, marks=needs_gpu)])
def test_large_forward_passes_equal_separate_ones(train, precision, tolerance):
    """bf16 too: cuDNN has no convolutions of fp64 in NHWC, so only others run BatchNorm in that layout."""
    settings = ("--precision", precision, "--micro-batch", "16", "--forward-batch")
    together, separate = (train(f"{precision}-{n}", *settings, n) for n in ("64", "16"))
    shown = [(run / "stdout.txt").read_text() for run in (together, separate)]
    assert "global batch 64 = 1 x 1 x " in shown[0] and "global batch 64 = 1 x 4 x 16 " in shown[1]
    assert max(differences(together, separate)) < tolerance


@pytest.mark.parametrize(("ranks", "backend"), RANKS)
def test_ddp_on_one_device_has_the_numbers_of_one_process(tmp_path, ranks, backend, monkeypatch):
    """NCCL with one process; with gloo, several share the device."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = "cuda:0" if DEVICE == "cuda" else "cpu"
    expected = weights_after(1, device, None, tmp_path / "expected")
    assert distance(weights_after(ranks, device, backend, tmp_path / "ranks"), expected) < 1e-9


def test_bitwise_has_the_numbers_of_single(train, reference):
    run = train("bitwise", "--precision", "fp64", "--parallel.strategy", "bitwise")
    assert losses(run) == pytest.approx(losses(reference), rel=1e-8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "bitwise"])
def test_two_gpus_have_the_numbers_of_one(train, reference, strategy):
    run = train(f"two-{strategy}", "--precision", "fp64", "--procs", "2", "--parallel.strategy", strategy)
    assert losses(run) == pytest.approx(losses(reference), rel=1e-8)


@needs_gpu
@pytest.mark.parametrize(("precision", "optimizer"), [("bf16", "adamw"), ("fp16", "sgd")])
def test_graphs_compute_what_single_kernels_do(train, precision, optimizer):
    # A learning rate that float32 represents, as a graph has it; otherwise training drifts apart.
    settings = ("--precision", precision, "--optimizer.name", optimizer, "--deterministic")
    settings += ("--schedule.name", "constant", "--optimizer.lr", str(2**-10))
    eager = train(f"eager-{precision}-{optimizer}", *settings)
    graphs = train(f"graphs-{precision}-{optimizer}", *settings, "--cuda-graphs")
    assert losses(graphs) == pytest.approx(losses(eager), rel=1e-3)


@needs_gpu
def test_a_compiled_network_computes_what_single_kernels_do(train, reference):
    """Of several micro-batches, whose BatchNorm is other code there."""
    run = train("compiled", "--precision", "fp32", "--model.compile", "auto")
    assert json.loads((run / "environment.json").read_text())["compiled"]
    assert 0 < max(differences(run, reference)) < 1e-3


# The same bits


@pytest.mark.parametrize("more", [(), pytest.param(("--cuda-graphs",), marks=needs_gpu)], ids=["kernels", "graphs"])
def test_a_deterministic_run_resumes_bit_for_bit(train, more):
    settings = ("--precision", HALF, "--deterministic", *more)
    whole = train(f"whole{len(more)}", *settings)
    part = train(f"part{len(more)}", *settings, "--stop-after", "3", code=75)
    if len(losses(part)) < 6:
        done = worldsize("train", "--resume", part, cwd=part.parents[1])
        assert done.returncode == 0, done.stderr
    assert bits(part) == bits(whole) and losses(part) == losses(whole)


@pytest.mark.parametrize(
    "command",
    [("audit", "{}"), ("replay", "{}", "--step", "1:3", "--from-start", "--out", "{}.html")],
    ids=["audit", "replay"],
)
def test_a_deterministic_run_is_reproduced(train, command):
    run = train("whole0", "--precision", HALF, "--deterministic")
    done = worldsize(*(word.format(run) for word in command), cwd=run.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr


@needs_gpu
def test_the_copy_of_the_next_images_changes_nothing(train):
    settings = ("--precision", HALF, "--deterministic")
    assert losses(train("not-ahead", *settings, "--data.no-device-prefetch")) == losses(train("whole0", *settings))


@needs_gpu
def test_a_network_without_deterministic_operations_is_refused(tmp_path):
    settings = ("--model.name", "vgg11", "--deterministic", "--max-steps", "1", "--data.train-crop-size", "256")
    done = worldsize("train", "imagenet", "--data.name", "synthetic", *settings, cwd=tmp_path)
    assert done.returncode == 64, done.stderr
    assert "leave out --deterministic" in done.stderr


# Memory and streams


@needs_gpu
def test_a_full_gpu_ends_the_run_with_a_batch_that_fits(tmp_path):
    """The process may use 4 GiB, so that the test is quick on every GPU, and leaves the others their memory."""
    settings = ("--data.name", "synthetic", "--data.samples", "256", "--global-batch", "256", "--micro-batch", "256")
    settings += ("--model.no-compile",)
    command = [sys.executable, str(HERE / "sabotage.py"), "small_gpu", "train", "imagenet", *settings]
    command += ["--schedule.warmup-epochs", "0", "--max-steps", "1", "--precision", "fp32"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 64, done.stderr
    assert "out of GPU memory" in done.stderr and "fits: add --micro-batch" in done.stderr


def on_host(count: int, side: int) -> list[Batch]:
    """Batches that differ in every value."""
    return [
        Batch(
            torch.full((8, side, side, 3), i, dtype=torch.uint8).pin_memory(),
            torch.full((8,), i).pin_memory(),
            np.full(8, i),
        )
        for i in range(count)
    ]


@needs_gpu
@pytest.mark.parametrize("late", ["computation", "copy"])
def test_images_are_copied_before_they_are_used_and_kept_until_then(late):
    """The GPU is kept busy, once where it computes and once where it copies, so that the other could overtake it."""
    feed, sums = Feed(iter(on_host(50, 128)), torch.device("cuda", 0)), []
    for batch in feed:
        if late == "computation":
            torch.cuda._sleep(2_000_000)  # cycles: a millisecond
        sums.append((batch.pixels.long().sum(), batch.labels.sum()))
        if late == "copy":
            with torch.cuda.stream(feed._stream):
                torch.cuda._sleep(2_000_000)
        feed.prefetch()
    assert [(int(pixels), int(labels)) for pixels, labels in sums] == [(i * 8 * 128 * 128 * 3, i * 8) for i in range(50)]


@needs_gpu
def test_epochs_do_not_take_more_and_more_memory():
    batches, reserved = on_host(4, 512), []
    for _ in range(40):
        feed = Feed(iter(batches), torch.device("cuda", 0))
        for batch in feed:
            batch.pixels.long().sum()
            feed.prefetch()
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2:] == reserved[2:3] * 38
