"""This machine, and what a run on it will use."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import worldsize
from worldsize.data.images import native
from worldsize.distributed.rank import cores, cpu_quota, discover_rank_info, threads_per_process
from worldsize.distributed.world import World

if TYPE_CHECKING:
    from worldsize.parallel.base import Strategy

_PACKAGES = ("torch", "torchvision", "numpy", "pillow", "safetensors", "pydantic")


def versions() -> dict[str, str | None]:
    """Versions of the packages that results depend on, without importing them."""
    return {"worldsize": worldsize.__version__, "python": platform.python_version()} | {p: _version(p) for p in _PACKAGES}


def hardware(kind: str, threads: int) -> dict[str, Any]:
    """What the bits of a run depend on, besides its recipe, data and versions: with equal values they are equal.

    Args:
        kind: of device.
        threads: of a process that computes on a CPU.
    """
    import torch

    cuda = kind == "cuda"
    return {
        "device": device_name(kind),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": None if cuda else threads,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": _nccl() if cuda else None,
        "driver": _driver() if cuda else None,
    }


def describe(world: World, precision: str, strategy: Strategy, compiled: bool, graphs: bool) -> dict[str, Any]:
    """What a run records about its machines, and how it uses them."""
    import torch

    return {
        "world_size": world.size,
        "launcher": world.rank_info.launcher,
        "strategy": strategy.describe(),
        "backend": strategy.backend,
        "device": device_name(world.device.type),
        "devices_here": torch.cuda.device_count() if world.device.type == "cuda" else 0,
        "threads_per_process": world.threads,
        "cores": cores(),
        "cpu_quota": cpu_quota(),
        "processes_here": world.rank_info.local_size,
        "precision": precision,
        "compiled": compiled,
        "cuda_graphs": graphs,
        "platform": platform.platform(),
        "versions": versions(),
        "hardware": hardware(world.device.type, world.threads),
    }


def table() -> list[tuple[str, str]]:
    """The lines of ``worldsize env``."""
    import torch

    from worldsize.config.recipe import Recipe
    from worldsize.training.precision import resolve

    rank_info = discover_rank_info()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda" if gpus else "cpu")
    backends = [name for name, available in _backends() if available]
    return [
        ("device", f"{gpus} x {device_name('cuda')}" if gpus else f"CPU, {device_name('cpu')}"),
        *([("CUDA", _cuda())] if gpus else []),
        ("cores", f"{cores()} usable by this process"),
        ("memory", _memory()),
        (
            "launcher",
            f"{rank_info.launcher}: rank {rank_info.rank} of {rank_info.size}"
            if rank_info.size > 1
            else "none (one process)",
        ),
        ("threads", f"{threads_per_process(rank_info)} per process ({rank_info.local_size} on this machine)"),
        ("backend", f"{'nccl' if gpus else 'gloo'} for more than one process (torch supports: {', '.join(backends)})"),
        ("precision", f"{resolve(Recipe(), device).name} if the recipe sets auto"),
        ("decoder", decoder()),
        *((name, found or "not installed") for name, found in versions().items()),
        ("horovod", _version("horovod") or "not installed"),
        *((f"{name} (extra)", _version(name) or "not installed") for name in ("tensorboard", "wandb")),
    ]


def _cuda() -> str:
    import torch

    driver = _driver() or "unknown"
    return f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {_nccl()}, driver {driver}"


def _nccl() -> str | None:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


def decoder() -> str:
    """The JPEG decoder in use and, if it is Pillow, why."""
    library = native.load()
    return (
        f"native, {library.version}"
        if library
        else f"Pillow {_version('pillow')}: no native decoder, {native.reason_missing()}"
    )


def device_name(kind: str) -> str:
    """The name of the GPU or the processor; "none" without a GPU."""
    if kind == "cuda":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's driver on Linux, such as 550.54.15."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read_text())
    except OSError:
        return None
    return found[0] if found else None


def _backends() -> list[tuple[str, bool]]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    return [("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()), ("mpi", dist.is_mpi_available())]


def _memory() -> str:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(fields[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
        return f"{total:.0f} GiB, {free:.0f} GiB free"
    except (OSError, KeyError, ValueError):
        return "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
