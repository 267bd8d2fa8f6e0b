"""The command line of ``worldsize plan``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from worldsize.config.command_line import Flat, RecipeFlags


@dataclass
class Machines:
    """Assumptions about the machines; measurements replace those that they determine."""

    devices_per_node: int = 8
    """Devices in each machine; fewer than this are in one machine."""
    images_per_s: str | None = None
    """Images/s of one device for this recipe, or several at different batches: 2470@256,1900@64; `worldsize bench step`
    measures it (default: an A100's, which NVIDIA reports as 2,470 for ResNet-50 at 224 pixels in mixed precision, scaled by
    the network's multiply-adds)."""
    fixed_ms: float = 4.0
    """Fixed time of each forward and backward pass: kernel launches, optimizer, loop."""
    node_bandwidth_gbit: float = 100.0
    """Network bandwidth of each machine, Gbit/s in each direction."""
    link_efficiency: float = 0.9
    """Share of it that messages reach."""
    link_latency_us: float = 10.0
    """Latency between machines: about 10 with RDMA, 25 to 50 with TCP."""
    intra_bandwidth_gbyte: float | None = None
    """Bandwidth between two devices of a machine, GB/s: NVLink 100 to 400, PCIe 10 to 25 (default: 200, or 2 between
    processes on a CPU)."""
    intra_latency_us: float = 5.0
    """Latency within a machine."""
    jitter: float = 0.01
    """Standard deviation of a device's compute time from step to step, relative."""
    contention: float = 0.001
    """How much slower a device computes per other device in its machine, relative."""


@dataclass
class Feed:
    """Assumptions about the images; these do not limit a prediction unless --cores-per-device or --storage-gbyte is set."""

    images_per_s_per_core: float = 1000.0
    """Images/s that one core reads, decodes and crops; `worldsize bench loader` measures it (1,000: JPEGs of ImageNet)."""
    cores_per_device: float | None = None
    """Cores for the loader of each device."""
    storage_gbyte: float | None = None
    """Read bandwidth of the storage that all devices share, GB/s."""
    image_kb: float | None = None
    """Mean size of an image file, kB (default: measured with data.root; else 110 for imagenet, 2 for cifar10, and 0 for
    digits and synthetic)."""
    train_images: int | None = None
    """Training images (default: of the dataset; for your own folder, set data.root or this)."""
    val_images: int | None = None
    """Validation images (default: of the dataset)."""
    classes: int | None = None
    """Classes (default: of the dataset)."""


@dataclass(kw_only=True)
class Plan:
    """Predict how RECIPE scales to more devices, and what it takes: time, price, network, loader, memory.

    Without measurements the prediction rests on the assumptions below, with wide ranges. Measure one or two sizes with
    `worldsize bench scaling` or `worldsize train` and pass the folders with --from: what they determine is fitted. Ranges
    are from the 5th to the 95th percentile; docs/scaling.md has the model and how it compares with published results.

    The devices share the recipe's global batch (strong scaling); with --weak each keeps its own. Every setting of the
    recipe is a flag with its dotted name. Examples:

    worldsize plan imagenet --devices 8,64,512 --global-batch 16384 --images-per-s 3000 --node-bandwidth-gbit 400

    worldsize plan my.yaml --devices 2,4,8 --from runs/bench-scaling-1 --price-per-hour 2.5 --json plan.json
    """

    devices: str | None = None
    """Numbers of devices, separated by commas (default: powers of two up to 1024 that can share the batch; 1 for
    strategies of one process)."""
    measured: Annotated[tuple[Path, ...], tyro.conf.arg(name="from")] = ()
    """Finished runs of this recipe, or folders of `bench scaling`, to calibrate with."""
    weak: bool = False
    """Keep the batch per device that the recipe has at the smallest of --devices."""
    price_per_hour: float | None = None
    """Price of one device for one hour; adds the price of the run."""
    json: Path | None = None
    """Also write everything to this JSON file, such as plan.json."""
    machines: Flat[Machines] = field(default_factory=Machines)
    feed: Flat[Feed] = field(default_factory=Feed)
    settings: RecipeFlags
