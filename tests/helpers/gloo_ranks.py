"""Processes of a test that form a group of their own."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World


def join(rank: int, size: int, folder: str) -> World:
    """The world of this process; all of it meets in ``folder``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    return World(RankInfo("torchrun", rank, size, rank, size, ("127.0.0.1", 1)), torch.device("cpu"), "gloo", 1, control)
