"""What DistributedDataParallel costs a process: steps of ResNet-50 without and with it, in turns.

    python benchmarks/ddp.py [--batch 256] [--size 224] [--steps 10] [--rounds 3]

In a group of one rank nothing is sent, so the difference is what DDP itself does: copying gradients into buckets and out of
them, its hooks, and starting the all-reduce of each bucket.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

CLASSES = 1000


def training(module: nn.Module, batch: int, size: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs one training step in bf16."""
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (batch,), device=device)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = functional.cross_entropy(module(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def milliseconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - begin) / steps * 1000


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 256), ("size", 224), ("steps", 10), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.backends.cudnn.benchmark = True
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, wrapped = (resnet50(num_classes=CLASSES).to(device, memory_format=torch.channels_last) for _ in range(2))
        steps = [
            training(module, arguments.batch, arguments.size, device)
            for module in (plain, DistributedDataParallel(wrapped, static_graph=True))
        ]
        # In turns, so that load of the machine affects both; the first round warms up.
        rounds = [[milliseconds(step, arguments.steps, device) for step in steps] for _ in range(arguments.rounds + 1)][1:]
    finally:
        dist.destroy_process_group()
    without, with_ddp = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(f"a step {without:.2f} ms, with DDP ({backend}, one rank) {with_ddp:.2f} ms: {with_ddp - without:+.2f} ms")


if __name__ == "__main__":
    main()
