"""The stream on which this process copies to and from a GPU, while it computes on another one."""

from __future__ import annotations

from functools import cache

import torch


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The same one at every call. torch has 32 streams per GPU and then gives them out again, also those of NCCL.

    Besides, it never gives memory that one stream used to another one: each new stream would keep its own.
    """
    return torch.cuda.Stream(device)
