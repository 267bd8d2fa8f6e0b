"""The processes of a run, as one of them sees it: device, threads, rendezvous, and agreement between ranks."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from worldsize.distributed import joining
from worldsize.distributed.rank import RankInfo, threads_per_process
from worldsize.errors import UserError, WorldsizeError, of_system

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from worldsize.config.recipe import Recipe

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


@dataclass(frozen=True)
class World:
    """The processes of the run, as this process sees it.

    ``control`` is a separate process group for small messages between hosts, so that they never wait for or
    reorder gradient traffic; None for a single process.
    """

    rank_info: RankInfo
    device: torch.device
    backend: str | None
    threads: int
    control: ProcessGroup | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def size(self) -> int:
        return self.rank_info.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints messages."""
        return self.rank_info.rank == 0

    def alone(self) -> World:
        """A world that consists of this process only."""
        return World(RankInfo(self.rank_info.launcher, 0, 1, 0, 1), self.device, None, self.threads)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (small, picklable), in rank order, on every rank."""
        if self.control is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_on_main(self, value: Any) -> list[Any] | None:
        """Every rank's ``value`` (picklable, also large), in rank order, on rank 0; None elsewhere."""
        if self.control is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self.control)
        return values

    def to_main(self, own: torch.Tensor) -> torch.Tensor | None:
        """Every rank's tensor on the CPU, which have one shape, as (W, ...) on rank 0; None elsewhere."""
        if self.control is None:
            return own[None]
        import torch
        import torch.distributed as dist

        everyone = [torch.empty_like(own) for _ in range(self.size)] if self.is_main else None
        dist.gather(own, everyone, dst=0, group=self.control)
        return None if everyone is None else torch.stack(everyone)

    def maximum(self, tensor: torch.Tensor) -> None:
        """Replace the elements of a tensor on the CPU by their maximum over all ranks."""
        if self.control is not None:
            import torch.distributed as dist

            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)

    def from_main(self, value: T) -> T:
        """Rank 0's ``value`` (small, picklable), on every rank."""
        if self.control is None:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        """Wait until all ranks have reached this call."""
        if self.control is not None:
            import torch.distributed as dist

            dist.barrier(group=self.control)

    def agree(self, failure: WorldsizeError | None) -> None:
        """If any rank has a failure, raise the first one (in rank order) on all ranks."""
        for rank, (kind, message) in enumerate(self.gather((type(failure), str(failure)) if failure else (None, ""))):
            if kind is not None:
                raise kind(message if self.size == 1 or rank == 0 else f"{message}\n(on rank {rank})")

    def collectively(self, work: Callable[[], T], local_first: bool = False) -> T:
        """Run ``work`` on every rank. If it fails with an expected error on any rank, all ranks raise that error.

        Args:
            local_first: one rank per node runs first, so that the others use what it cached.
        """
        result: T | None = None
        failure: WorldsizeError | None = None
        for turn in (True, False) if local_first else (None,):
            if turn is None or turn == (self.rank_info.local_rank == 0):
                try:
                    result = work()
                except WorldsizeError as error:
                    failure = error
                except OSError as error:
                    failure = of_system(f"{error.filename or 'the file system'}: {error.strerror or error}", error)
            if turn:
                self.barrier()
        self.agree(failure)
        return cast(T, result)

    def close(self) -> None:
        """Leave the process group."""
        if self.control is not None:
            import torch.distributed as dist

            dist.destroy_process_group()


def join(rank_info: RankInfo, recipe: Recipe, threads: int | None = None, hosts_only: bool = False) -> World:
    """Set up this process's device and threads, and join the process group.

    Args:
        threads: threads that compute on a CPU; None: this process's share of the cores.
        hosts_only: only hosts exchange messages, also if this process computes on a GPU. A group that is bound to a GPU
            would make every rank take part in the creation of each pair's group (`ncclCommSplit`), which then hangs.

    Raises:
        UserError: the device does not exist, or the group does not have the requested size.
        PeersUnreachable: the other processes cannot be reached.
    """
    import torch

    threads = threads or threads_per_process(rank_info)
    torch.set_num_threads(threads)
    device = _device(rank_info, recipe.device)
    _keep_freed_memory()
    if rank_info.size == 1:
        return World(rank_info, device, None, threads)
    import torch.distributed as dist

    nccl = device.type == "cuda" and not hosts_only
    timeout = timedelta(seconds=recipe.parallel.timeout_s)
    joining.init_process_group(rank_info, "cpu:gloo,cuda:nccl" if nccl else "gloo", timeout, device if nccl else None)
    control = dist.new_group(backend="gloo", timeout=timeout)
    world = World(rank_info, device, "nccl" if nccl else "gloo", threads, control)
    _assert_size(world)
    return world


def _assert_size(world: World) -> None:
    import torch.distributed as dist

    ranks = world.gather(world.rank)
    if dist.get_world_size() != world.size or ranks != list(range(world.size)):
        raise UserError(f"expected {world.size} processes, but the group has ranks {ranks}")


def no_gpu(asked: str, instead: str) -> UserError:
    """The error for a GPU that was asked for where torch finds none."""
    return UserError(f"{asked}: torch finds no GPU on this machine; use {instead}, or see `worldsize env`")


def _device(rank_info: RankInfo, choice: str) -> torch.device:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise no_gpu("--device cuda", "--device cpu")
    own = _has_own_gpus(rank_info.launcher, count, os.environ)
    if rank_info.local_rank >= count and not own:
        raise UserError(
            f"{rank_info.local_size} processes run on this machine, but it has {count} GPU{'s' * (count > 1)}: "
            f"use --procs {count}, or --device cpu"
        )
    device = torch.device("cuda", rank_info.local_rank if rank_info.local_rank < count else 0)
    torch.cuda.set_device(device)
    return device


def _has_own_gpus(launcher: str, count: int, env: Mapping[str, str]) -> bool:
    """Whether each process may see only GPUs of its own, ``count`` of them. If not, NCCL names the GPU that two use."""
    if launcher == "Slurm" and "SLURM_GPUS_PER_TASK" in env:
        return True
    if launcher in ("torchrun", "horovodrun"):  # with a script around each process
        return count == 1 and "CUDA_VISIBLE_DEVICES" in env
    return count == 1 and launcher not in ("none", "worldsize --procs")


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it to the kernel and faulting it in again.

    ResNet-50 at 224 pixels, 32 samples, two cores: one third of the page faults, 7 % more images/s.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # another C library has no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
