"""Errors of GPUs, NCCL and gloo, explained: torch's own messages name neither the remedy nor, mostly, the peer."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from worldsize.errors import GpuFull, NcclFailed, PeerLost, UserError, WorldsizeError, first_line

# What NCCL's last line says, and what is behind it in most reports.
_NCCL_CAUSES = (
    (r"Duplicate GPU detected", "two processes use the same GPU: start at most one process per GPU, or pass --device cpu"),
    (
        r"ncclRemoteError|Connection (?:closed|reset)|Broken pipe",
        "that process ended or its network failed: look at its own log first",
    ),
    (
        r"ncclSystemError|unhandled system error",
        "a network interface or shared memory: set NCCL_SOCKET_IFNAME to the interface that connects the hosts, and give "
        "containers more /dev/shm",
    ),
    (r"out of memory", "the GPU is full: lower --micro-batch or --data.train-crop-size, or stop what else uses the GPU"),
)


# How libraries word that a GPU is full. cuDNN tries one algorithm after the other, and hides why each of them failed.
_FULL = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|STATUS_ALLOC_FAILED|(?:FIND|GET) was unable to find an engine"
)
_OF_DEVICE = re.compile(r"CUDA (?:driver )?error|cuDNN error|CU[A-Z]+_STATUS_|unable to find an engine")

# gloo's messages begin with the place in its source: "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] ..."
_GLOO = re.compile(r"\[\S*gloo/\S+:\d+\] (.+)")


@contextmanager
def explained(rank: int, fitting: Callable[[], str]) -> Iterator[None]:
    """Around work on a GPU: raises its errors as `explain` words them; arguments as there."""
    try:
        yield
    except RuntimeError as error:
        known = explain(error, rank, fitting)
        if known is None:
            raise
        raise known from None


def explain(error: RuntimeError, rank: int, fitting: Callable[[], str]) -> WorldsizeError | None:
    """The error as a message with a remedy; None if it is neither of a GPU nor of NCCL or gloo.

    Args:
        fitting: called if the GPU is out of memory, without the memory of what failed; returns the remedy.
    """
    if isinstance(error, dist.DistBackendError):
        return nccl(str(error), rank)
    if is_full(error):
        what = first_line(error).split(". ")[0]
        traceback.clear_frames(error.__traceback__)  # they hold the activations
        return GpuFull(f"out of GPU memory: {fitting()} ({what})")
    if found := _GLOO.match(str(error)):
        return PeerLost(f"rank {rank} lost another process: {found[1].strip()}. Look at the log of that process first")
    if found := re.match(r"(\S+) does not have a deterministic implementation", str(error)):
        return UserError(
            f"{found[1]}, which this model needs on a GPU, has no deterministic implementation: leave out --deterministic "
            "(a resumed run then agrees up to rounding), or choose another --model.name"
        )
    return None


def is_full(error: BaseException) -> bool:
    """Whether a GPU is out of memory, whichever library says so."""
    full = isinstance(error, RuntimeError) and _FULL.search(str(error)) is not None
    return full or isinstance(error, torch.OutOfMemoryError)


def is_of_device(error: BaseException) -> bool:
    """Whether a GPU or its libraries failed, so that the error says nothing about what was asked of them."""
    kinds = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))  # torch 2.6 has one only
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and _OF_DEVICE.search(str(error)) is not None)


def nccl(message: str, rank: int) -> NcclFailed | GpuFull:
    """NCCL's message in one line that names the peer and the likely cause."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    last = next((after for line, after in itertools.pairwise(lines) if line == "Last error:"), "")
    peer = re.search(r"(?:remote peer|(?:to|from)(?: peer)?) (\S+)<\d+>|(rank \d+ and rank \d+)", last)
    name = f" with {peer[1] or peer[2]}" if peer else ""
    cause = next((cause for pattern, cause in _NCCL_CAUSES if re.search(pattern, message)), "")
    advice = cause or "NCCL_DEBUG=INFO makes NCCL say more"
    text = f"rank {rank}: NCCL failed{name}: {last or first_line(RuntimeError(message))}. Likely cause: {advice}"
    return GpuFull(text) if "out of memory" in message else NcclFailed(text)
