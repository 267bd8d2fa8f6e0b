"""Networks at which torch's library for CPUs writes outside of its memory are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from processes import worldsize
from worldsize.models import cpu_faults

CPU = torch.device("cpu")
NETWORK = """
from torch import nn
def net(classes):
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 1, 2), pool, nn.Flatten(), nn.Linear(8, classes))
"""


@pytest.fixture(params=["AVX2", "AVX512"])
def block(request, monkeypatch) -> int:
    """The channels that a processor computes together."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    return {"AVX2": 8, "AVX512": 16}[request.param]


def test_a_strided_1x1_convolution_of_few_channels_is_named(block):
    network = nn.Sequential(nn.Conv2d(3, block - 1, 3), nn.Conv2d(block - 1, 32, 1, 2))
    said = cpu_faults.warning(network, CPU, "fp32", channels_last=True)
    assert said is not None and said.startswith("1: ") and f"fewer than {block} input channels" in said


@pytest.mark.parametrize(
    ("convolution", "device", "precision", "channels_last"),
    [
        (nn.Conv2d(16, 32, 1, 2), "cpu", "fp32", True),
        (nn.Conv2d(4, 32, 1), "cpu", "fp32", True),
        (nn.Conv2d(4, 32, 3, 2), "cpu", "fp32", True),
        (nn.Conv2d(4, 4, 1, 2, groups=4), "cpu", "fp32", True),
        (nn.Conv2d(4, 32, 1, 2), "cuda", "fp32", True),
        (nn.Conv2d(4, 32, 1, 2), "cpu", "bf16", True),
        (nn.Conv2d(4, 32, 1, 2), "cpu", "fp32", False),
    ],
)
def test_others_are_not(block, convolution, device, precision, channels_last):
    assert cpu_faults.warning(convolution, torch.device(device), precision, channels_last) is None


def test_no_network_of_torchvision_has_one(block):
    for name in ("resnet50", "densenet121", "mobilenet_v3_small", "shufflenet_v2_x0_5", "regnet_y_400mf", "efficientnet_b0"):
        network = torchvision.models.get_model(name, num_classes=10)
        assert cpu_faults.warning(network, CPU, "fp32", channels_last=True) is None


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="a processor without the fault"
)
@pytest.mark.parametrize(("flags", "warned"), [((), True), (("--model.no-channels-last",), False)])
def test_a_run_warns(tmp_path: Path, flags, warned):
    (tmp_path / "net.py").write_text(NETWORK)
    words = ("--model.name", "net.py:net", "--precision", "fp32", "--max-steps", "1", *flags)
    done = worldsize("train", "digits", *words, "--name", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("writes outside of its memory" in done.stdout + done.stderr) == warned
