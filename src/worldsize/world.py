"""Who am I: rank, world size, device and backend, from torchrun, Open MPI, Slurm, or nothing."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from worldsize.errors import UserError, WorldsizeError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from worldsize.recipe import Recipe

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h

# Set for the processes that `worldsize --procs N` starts itself.
LOCAL_LAUNCH = "WORLDSIZE_LOCAL_LAUNCH"


@dataclass(frozen=True)
class Place:
    """What the launcher says about this process; known before torch is imported.

    ``master`` is where rank 0 listens, (address, port); None for a process on its own.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master: tuple[str, int] | None = None


def discover(env: Mapping[str, str] = os.environ) -> Place:
    """This process's place, from the environment that its launcher set.

    Looks for torchrun's variables, then horovodrun's, then Open MPI's (4 and 5), then those of a Slurm job step.

    Raises:
        UserError: the variables contradict each other or are incomplete.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _torchrun(env)
    if "HOROVOD_RANK" in env and "HOROVOD_SIZE" in env:
        return _horovodrun(env)
    if "OMPI_COMM_WORLD_SIZE" in env:
        return _open_mpi(env)
    if "SLURM_STEP_ID" in env and "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        return _slurm(env)
    return Place("none", 0, 1, 0, 1)


def here(processes: int) -> Place:
    """The place of rank 0 in a world of ``processes`` that `worldsize --procs` is about to start."""
    return Place("worldsize --procs" if processes > 1 else "none", 0, processes, 0, processes)


def _torchrun(env: Mapping[str, str]) -> Place:
    size = _number(env, "WORLD_SIZE")
    local_size = _number(env, "LOCAL_WORLD_SIZE", size)
    rank = _number(env, "RANK")
    place = Place(
        "worldsize --procs" if LOCAL_LAUNCH in env else "torchrun",
        rank,
        size,
        _number(env, "LOCAL_RANK", rank % local_size),
        local_size,
        _master(env, None, None) if size > 1 else None,
    )
    return _checked(place)


def _horovodrun(env: Mapping[str, str]) -> Place:
    """Its Gloo form; with MPI it starts mpirun, whose variables are found."""
    size = _number(env, "HOROVOD_SIZE")
    local_size = _number(env, "HOROVOD_LOCAL_SIZE", size)
    place = Place(
        "horovodrun",
        _number(env, "HOROVOD_RANK"),
        size,
        _number(env, "HOROVOD_LOCAL_RANK", 0),
        local_size,
        _master(env, "127.0.0.1" if local_size == size else None, env.get("HOROVOD_GLOO_RENDEZVOUS_PORT", ""))
        if size > 1
        else None,
    )
    return _checked(place)


def _open_mpi(env: Mapping[str, str]) -> Place:
    size = _number(env, "OMPI_COMM_WORLD_SIZE")
    local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    # Open MPI 5 names the job in PMIX_NAMESPACE, 4 in the other two.
    job = next((env[k] for k in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid") if k in env), "")
    place = Place(
        "Open MPI",
        _number(env, "OMPI_COMM_WORLD_RANK"),
        size,
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local_size,
        _master(env, "127.0.0.1" if local_size == size else None, job) if size > 1 else None,
    )
    return _checked(place)


def _slurm(env: Mapping[str, str]) -> Place:
    size = _number(env, "SLURM_STEP_NUM_TASKS")
    nodes = _number(env, "SLURM_STEP_NUM_NODES", 1)
    # "4(x2)" means four tasks on each of two nodes; uneven nodes ("4,2") give every node its own number.
    per_node = [
        int(count.split("(")[0])
        for count in env.get("SLURM_STEP_TASKS_PER_NODE", str(size // nodes)).split(",")
        for _ in range(int(count.split("(x")[1].rstrip(")")) if "(x" in count else 1)
    ]
    node = _number(env, "SLURM_NODEID", 0)
    local_size = per_node[node] if node < len(per_node) else size // nodes
    first = first_host(env.get("SLURM_STEP_NODELIST", "localhost"))
    job = f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    place = Place(
        "Slurm",
        _number(env, "SLURM_PROCID"),
        size,
        _number(env, "SLURM_LOCALID", 0),
        local_size,
        _master(env, "127.0.0.1" if nodes == 1 else first, job) if size > 1 else None,
    )
    return _checked(place)


def _master(env: Mapping[str, str], address: str | None, job: str | None) -> tuple[str, int]:
    """Where rank 0 listens. Without MASTER_PORT, a port derived from the job's id, so that two jobs differ."""
    address = env.get("MASTER_ADDR") or address
    if address is None:
        raise UserError(
            "this process is one of several but cannot tell where rank 0 listens: "
            "set MASTER_ADDR to rank 0's host (mpirun -x MASTER_ADDR=HOST) and MASTER_PORT to a free port there"
        )
    if "MASTER_PORT" in env:
        return address, _number(env, "MASTER_PORT")
    if job is None:
        raise UserError("MASTER_PORT is not set: set it to a free port on rank 0's host")
    return address, 20000 + zlib.crc32(job.encode()) % 12000


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None:
        if default is None:
            raise UserError(f"the launcher did not set {name}")
        return default
    try:
        return int(value)
    except ValueError:
        raise UserError(f"environment variable {name} is {value!r}, not a number") from None


def _checked(place: Place) -> Place:
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
        raise UserError(
            f"{place.launcher} says rank {place.rank} of {place.size}, local rank {place.local_rank} of "
            f"{place.local_size}: these cannot be right; look at the variables it set"
        )
    return place


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-05,9],login`` gives ``gpu03``."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, after = rest.partition("]")
    return head + inside.split(",")[0].split("-")[0] + after.split(",")[0]


def cores() -> int:
    """How many CPU cores this process may use: its affinity, and the cgroup's quota if that is smaller."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        available = min(available, max(1, int(quota) // int(period)))
    return available


def threads_per_process(place: Place, env: Mapping[str, str] = os.environ) -> int:
    """This process's fair share of the cores, unless the user set OMP_NUM_THREADS.

    torchrun sets OMP_NUM_THREADS=1 where it was unset; that is not the user's word.
    """
    chosen = env.get("OMP_NUM_THREADS", "")
    torchruns_own = chosen == "1" and "TORCHELASTIC_RUN_ID" in env and LOCAL_LAUNCH not in env
    if chosen.isdigit() and int(chosen) > 0 and not torchruns_own:
        return int(chosen)
    return max(1, cores() // place.local_size)


@dataclass(frozen=True)
class World:
    """All processes of the run, seen from one of them.

    ``control`` is a process group of its own for small messages between hosts, so that they never wait for, or
    reorder, gradient traffic; None where there is one process.
    """

    place: Place
    device: torch.device
    backend: str | None
    threads: int
    control: ProcessGroup | None = field(default=None, repr=False)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and talks to the user."""
        return self.place.rank == 0

    def alone(self) -> World:
        """This process as if there were no other."""
        return World(Place(self.place.launcher, 0, 1, 0, 1), self.device, None, self.threads)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (small, picklable), in rank order, on every rank."""
        if self.control is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.control is not None:
            import torch.distributed as dist

            dist.barrier(group=self.control)

    def agree(self, failure: WorldsizeError | None) -> None:
        """Raise, on all ranks alike, the first rank's failure if any has one."""
        for rank, (kind, message) in enumerate(self.gather((type(failure), str(failure)) if failure else (None, ""))):
            if kind is not None:
                raise kind(message if self.size == 1 or rank == 0 else f"{message}\n(on rank {rank})")

    def together(self, work: Callable[[], T], local_first: bool = False) -> T:
        """Do ``work`` on every rank; where one fails for a reason worth telling, all raise that.

        Args:
            local_first: one rank per machine goes ahead, so that the others find what it cached.
        """
        result: T | None = None
        failure: WorldsizeError | None = None
        for turn in (True, False) if local_first else (None,):
            if turn is None or turn == (self.place.local_rank == 0):
                try:
                    result = work()
                except WorldsizeError as error:
                    failure = error
                except OSError as error:
                    failure = UserError(f"{error.filename or 'the file system'}: {error.strerror or error}")
            if turn:
                self.barrier()
        self.agree(failure)
        return cast(T, result)

    def close(self) -> None:
        """Leave the process group."""
        if self.control is not None:
            import torch.distributed as dist

            dist.destroy_process_group()


def join(place: Place, recipe: Recipe) -> World:
    """Take this process's device and threads, and meet the other processes.

    Raises:
        UserError: the device is not there, the others cannot be reached, or the world is not of the size asked for.
    """
    import torch

    threads = threads_per_process(place)
    torch.set_num_threads(threads)
    device = _device(place, recipe.device)
    if device.type == "cpu":
        _keep_freed_memory()
    if place.size == 1:
        return World(place, device, None, threads)
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=recipe.parallel.timeout_s)
    _meet(place, backend, timeout, device if device.type == "cuda" else None)
    control = dist.new_group(backend="gloo", timeout=timeout)
    world = World(place, device, "nccl" if device.type == "cuda" else "gloo", threads, control)
    _assert_size(world)
    return world


def _meet(place: Place, backend: str, timeout: timedelta, device: torch.device | None) -> None:
    import torch.distributed as dist

    assert place.master is not None
    address, port = place.master
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    try:
        dist.init_process_group(
            backend, init_method="env://", rank=place.rank, world_size=place.size, timeout=timeout, device_id=device
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise UserError(
                f"port {port} on {address} is in use, by another job perhaps: set MASTER_PORT to a free one"
            ) from None
        raise UserError(f"rank {place.rank} cannot reach rank 0 at {address}:{port}: {_first_line(error)}") from None
    except (dist.DistStoreError, socket.gaierror) as error:
        raise UserError(
            f"rank {place.rank} did not find all {place.size} processes at {address}:{port} "
            f"within {timeout.total_seconds():g} s: {_first_line(error)}"
        ) from None


def _assert_size(world: World) -> None:
    import torch.distributed as dist

    ranks = world.gather(world.rank)
    if dist.get_world_size() != world.size or ranks != list(range(world.size)):
        raise UserError(f"asked for {world.size} processes, but the group has ranks {ranks}")


def _device(place: Place, choice: str) -> torch.device:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu, or look at `worldsize env`")
    if count == 1 and place.launcher in ("Slurm", "Open MPI"):
        # These can show each process its own GPU alone (srun --gpus-per-task=1).
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        return device
    if place.local_rank >= count:
        raise UserError(
            f"{place.local_size} processes on this machine, but it has {count} GPU{'s' * (count > 1)}: "
            f"use --procs {count}, or --device cpu"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _keep_freed_memory() -> None:
    """Let glibc keep what one step frees for the next, instead of giving it back to the kernel and faulting it in again.

    ResNet-50 at 224 pixels, 32 samples, two cores: a third of the page faults, 7 % more images/s.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # another C library has no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
