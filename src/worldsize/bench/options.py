"""The command lines of ``bench step``, ``bench strategies`` and ``bench loader``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass
class BenchStep:
    """Measure a training step without loading images: worldsize's own, a bare loop and torchvision's reference script.

    All run in one process, interleaved in rounds. Prints a table (images/s, ratios, share of the GPU's peak, memory, host
    time, kernels) and writes it with all measurements to OUT/bench-step-N.
    """

    model: str = "resnet50"
    """Any torchvision classification model."""
    batch: int = 256
    """Samples per step, in one forward pass."""
    micro_batch: int | None = None
    """Samples that share BatchNorm statistics (default: all; on a GPU also 32, as recipes have it)."""
    size: int = 224
    """Side of the images, pixels."""
    precision: tuple[Literal["auto", "fp32", "tf32", "bf16", "fp16"], ...] = ()
    """Number formats (default: bf16, fp16 and tf32 on a GPU, auto on a CPU)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device (auto: a GPU if there is one)."""
    compile: bool = False
    """Also measure networks compiled by torch.compile; compiling takes minutes."""
    steps: int = 20
    """Steps of each form per round."""
    warmup: int = 5
    """Steps of each form before the first round."""
    rounds: int = 5
    """Rounds."""
    only: tuple[str, ...] = ()
    """Measure only these forms, such as 'bare bf16' 'worldsize bf16' (default: all)."""
    out: Path = Path("runs")
    """Folder for the results."""


@dataclass
class BenchStrategies:
    """Compare all strategies that work on this machine: real runs on synthetic images, interleaved in rounds.

    Prints a table and writes it, with all measurements and the runs themselves, to OUT/bench-strategies-N.
    """

    procs: int = 2
    """Processes on this machine."""
    model: str = "resnet50"
    """Any torchvision classification model."""
    batch: int = 8
    """Samples per process and step."""
    size: int = 224
    """Side of the images, pixels."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    """Number format."""
    steps: int = 19
    """Steps of each run; the first three are not counted."""
    rounds: int = 3
    """How often each strategy runs."""
    only: tuple[str, ...] = ()
    """Compare only these with ddp, by their names in the table (quote names with spaces)."""
    out: Path = Path("runs")
    """Where the folder is created."""


@dataclass
class BenchLoader:
    """Measure how fast training images of a dataset are read, decoded and cropped, by this loader and by others,
    interleaved in rounds; names the bottleneck and the number of cores that a device needs.

    Prints a table and writes it, with all measurements, to OUT/bench-loader-N.
    """

    root: tuple[Path, ...]
    """The dataset, as files or packed; further ones, such as its packed forms, are compared with it."""
    data: Literal["imagenet", "folder", "cifar10"] | None = None
    """Layout of the datasets (default: detected)."""
    against: str = ""
    """Loaders to compare with, separated by commas: torchvision, timm, torchcodec, dali, webdataset. Each runs with half,
    one and two worker processes per core."""
    recipe: str | None = None
    """Crop and augment as this recipe, which also sets the size (default: mirror and random resized crop)."""
    size: int | None = None
    """Side of the crops, pixels (default: the recipe's, or 224)."""
    batch: int = 64
    """Images per batch."""
    workers: int | None = None
    """Decoding threads (default: one per core)."""
    readers: int = 16
    """Reads in flight."""
    prefetch: int = 4
    """Batches prepared ahead."""
    images: int = 2000
    """Images per pass, at most."""
    rounds: int = 5
    """How often each loader runs, after one round that is not counted."""
    feed: float = 2500
    """Images/s that a device consumes; the default is about ResNet-50 in mixed precision on one A100 (NVIDIA)."""
    out: Path = Path("runs")
    """Where the folder is created."""
