"""Published results about scaling, as context for what was measured.

Each GPU computes as many images at every size (weak scaling). Efficiency is relative to one GPU, unless the name says more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """``efficiency`` of ``processes`` GPUs, 0 to 1."""

    system: str
    processes: int
    efficiency: float
    source: str


_HOROVOD = "Horovod, docs/benchmarks.rst"
_DLPERF = "DLPerf (Oneflow-Inc), PyTorch ResNet-50 v1.5"
_NVIDIA = "NVIDIA DeepLearningExamples, PyTorch ResNet-50 v1.5"
RESULTS = (
    Published("NVIDIA, ResNet-50, A100, mixed precision", 8, 0.84, _NVIDIA),
    Published("NVIDIA, ResNet-50, A100, TF32", 8, 0.965, _NVIDIA),
    Published("DLPerf, ResNet-50, V100, mixed precision", 16, 0.934, _DLPERF),
    Published("DLPerf, ResNet-50, V100, mixed precision", 32, 0.878, _DLPERF),
    Published("TensorFlow, ResNet-50, K80, 10 Gbit/s", 64, 0.818, "TensorFlow, benchmarks of May 2017"),
    Published("ChainerMN, ResNet-50", 128, 0.9, "Akiba et al. 2017, arXiv 1710.11351"),
    Published("Goyal et al., ResNet-50, P100, 50 Gbit/s, relative to 8", 256, 0.9, "Goyal et al. 2017, arXiv 1706.02677"),
    Published("Horovod, ResNet-101, P100, 25 Gbit/s", 512, 0.9, _HOROVOD),
    Published("Horovod, Inception V3, P100, 25 Gbit/s", 512, 0.9, _HOROVOD),
    Published("Horovod, VGG-16, P100, 25 Gbit/s", 512, 0.68, _HOROVOD),
)
