"""Baseline for worldsize: a minimal PyTorch training loop, without logging, checkpoints or evaluation.

    python bare.py --steps 6 --batch 32 --size 224 --precision bf16      one process
    torchrun --nproc-per-node 2 bare.py ...                              several, with DDP
    mpirun -np 2 python bare.py --horovod average|adasum ...             several, with Horovod

Prints one JSON object: the time when the first step completed (Unix time, s) and the seconds of each step.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy  # noqa: F401  (included in the startup time, as in worldsize and most scripts)
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--horovod", choices=["average", "adasum"])
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    # Horovod only accepts contiguous tensors.
    layout = torch.contiguous_format if arguments.horovod else torch.channels_last
    model: nn.Module = torchvision.models.resnet50(num_classes=1000).to(memory_format=layout)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=1e-4, foreach=True)
    if arguments.horovod:
        import horovod.torch as hvd

        hvd.init()
        os.environ["RANK"] = str(hvd.rank())
        operation = hvd.Average if arguments.horovod == "average" else hvd.Adasum
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=operation)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    pixels = torch.randn(arguments.batch, 3, arguments.size, arguments.size).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (arguments.batch,))
    seconds, first = [], 0.0
    for step in range(arguments.steps):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.precision == "bf16"):
            loss = nn.functional.cross_entropy(model(pixels), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        first = first if step else time.time()
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps({"first_step_at": first, "seconds": seconds}))
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
