"""A GPU whose memory is small, and what runs on GPUs promise. These tests need one: ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch

from processes import records, worldsize
from worldsize import cli
from worldsize.distributed.copy_stream import copy_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU on this machine"),
]
SYNTHETIC = (
    *("--data.name", "synthetic", "--data.samples", "256", "--max-steps", "1", "--schedule.warmup-epochs", "0"),
    "--model.no-compile",
)


@pytest.fixture
def small_gpu():
    """8 GB for this process: too little for ResNet-50 with 256 images in fp32, enough for 32."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(8e9 / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_default_forward_pass_is_lowered_to_what_fits(small_gpu, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    settings = ("--precision", "fp32", "--global-batch", "256", "--micro-batch", "32")
    assert cli.main(["train", "imagenet", *SYNTHETIC, *settings]) == 0
    assert "instead of 256, because of the GPU's memory" in caplog.text


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(small_gpu, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    settings = ("--precision", "fp32", "--global-batch", "256", "--micro-batch", "256")
    assert cli.main(["train", "imagenet", *SYNTHETIC, *settings]) == 64
    assert "fits: add --micro-batch" in capfd.readouterr().err


def test_a_run_without_determinism_is_audited_and_replayed_up_to_rounding(tmp_path):
    settings = ("--model.name", "resnet18", "--max-steps", "12", "--schedule.warmup-epochs", "0", "--name", "a")
    settings += ("--model.no-compile",)  # three times a minute
    assert worldsize("train", "digits", *settings, cwd=tmp_path).returncode == 0
    done = worldsize("audit", "runs/a", cwd=tmp_path)
    assert done.returncode == 0 and "CONSISTENT up to rounding" in done.stdout, done.stdout + done.stderr
    last = len(records(tmp_path / "runs" / "a", "step"))
    done = worldsize("replay", "runs/a", "--step", f"1:{last}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_one_copy_stream():
    device = torch.device("cuda", 0)
    assert copy_stream(device) is copy_stream(torch.device("cuda", 0))
