"""``worldsize bench allreduce``: latency and bandwidth between the processes of a run, over message sizes."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from worldsize.bench.tables import table
from worldsize.config import command_line
from worldsize.config.recipe import Recipe
from worldsize.distributed.rank import RankInfo, discover_rank_info
from worldsize.errors import SUCCESS, UserError
from worldsize.launch.distribute import check_procs, distribute
from worldsize.runs import run_folder

if TYPE_CHECKING:
    import torch

    from worldsize.distributed.stop_signals import StopFlag
    from worldsize.distributed.world import World

    AllReduce = Callable[[torch.Tensor], None]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_WARMUP = 3  # calls that do not count
_FEWEST, _MOST = 5, 1000  # calls of one size


@dataclass
class BenchAllreduce:
    """Measure all-reduces of float32 between processes, by message size.

    Starts --procs processes on this machine, or measures between the processes of torchrun, mpirun or srun, on any number
    of machines. Bus bandwidth is what nccl-tests reports: bytes / time x 2 (n - 1) / n, which a link's bandwidth limits
    whatever the number of processes n. Prints a table and writes it with all measurements to OUT/bench-allreduce-N.

    worldsize bench allreduce --procs 4

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint h1:29400 -m worldsize bench allreduce

    mpirun -np 4 worldsize bench allreduce --through horovod
    """

    procs: int = 2
    """Processes on this machine, if no launcher has started several."""
    through: Literal["torch", "horovod"] = "torch"
    """torch: NCCL between GPUs and gloo between CPUs, as ddp; horovod: Horovod over what it was started with (MPI, gloo)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device (auto: GPUs if there are any)."""
    min_bytes: str = "4K"
    """Smallest message; K, M and G are powers of 1024."""
    max_bytes: str = "64M"
    """Largest message."""
    factor: int = 4
    """Ratio of successive sizes."""
    seconds: float = 0.5
    """Time for each size."""
    out: Path = Path("runs")
    """Folder for the results."""


@dataclass(frozen=True)
class Measured:
    """Messages of ``bytes``: the median over ``calls`` of the slowest rank's time, and its range from the 10th to the 90th
    percentile, microseconds; bandwidths in 10^9 bytes per second."""

    bytes: int
    calls: int
    us: float
    low_us: float
    high_us: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    asked = command_line.parse(BenchAllreduce, argv, BenchAllreduce(), "bench allreduce")
    sizes = message_sizes(asked)
    rank_info = discover_rank_info()
    if rank_info.size == 1 and check_procs(asked.procs) == 1:
        raise UserError("--procs 1: an all-reduce needs at least 2 processes")
    procs = asked.procs if rank_info.size == 1 else 1
    return distribute(["bench", "allreduce", *argv], procs, rank_info, lambda stop: _measure(asked, sizes, rank_info, stop))


def message_sizes(asked: BenchAllreduce) -> list[int]:
    """The sizes in bytes, ascending.

    Raises:
        UserError: a size is not one, or there is none.
    """
    smallest, largest = (_bytes(flag, getattr(asked, flag)) for flag in ("min_bytes", "max_bytes"))
    if asked.factor < 2:
        raise UserError(f"--factor {asked.factor}: must be at least 2")
    if not 0 < asked.seconds < math.inf:
        raise UserError(f"--seconds {asked.seconds:g}: must be positive and finite")
    if smallest > largest:
        raise UserError(f"--min-bytes {asked.min_bytes} is larger than --max-bytes {asked.max_bytes}")
    return [smallest * asked.factor**i for i in range(int(math.log(largest / smallest, asked.factor) + 1e-9) + 1)]


def _bytes(name: str, text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if size < 4 or size % 4:
        raise UserError(f"--{name.replace('_', '-')} {text!r}: pass a multiple of 4 bytes, such as 4096, 4K or 64M")
    return size


def _measure(asked: BenchAllreduce, sizes: list[int], rank_info: RankInfo, stop: StopFlag) -> int:
    from worldsize.distributed.world import join

    world = join(rank_info, Recipe(device=asked.device))
    name, all_reduce = world.collectively(lambda: _through(asked.through, world))
    folder = world.from_main(world.collectively(lambda: _folder(asked, world)))
    if world.is_main:
        print(f"{world.size} processes on {world.device.type}, {name}", flush=True)
    results: list[Measured] = []
    for size in sizes:
        if any(world.gather(bool(stop))):
            break
        results.append(measure(size, world, all_reduce, asked.seconds))
        if world.is_main:
            _write(folder, name, world.size, results)
            print(f"{_size(size):>8} {results[-1].us:12,.1f} us {results[-1].bus_gb_per_s:9.3f} GB/s", flush=True)
    if world.is_main:
        print(f"\n{(folder / 'table.md').read_text('utf-8')}\nAll measurements: {folder / 'results.jsonl'}")
    world.close()
    return SUCCESS


def _folder(asked: BenchAllreduce, world: World) -> Path:
    return run_folder.create(asked.out, None, "bench-allreduce").path if world.is_main else asked.out


def _through(name: str, world: World) -> tuple[str, AllReduce]:
    """What sums tensors over all ranks, with its name for people."""
    import torch.distributed as dist

    if name == "torch":
        return str(world.backend), lambda tensor: dist.all_reduce(tensor)
    from worldsize.config.recipe import Parallel
    from worldsize.parallel.horovod import installed, strategy

    installed.check(Recipe(device=world.device.type, parallel=Parallel(strategy="horovod")), world.rank_info)
    return strategy.all_reduce(world)


def measure(size: int, world: World, all_reduce: AllReduce, seconds: float) -> Measured:
    """Time all-reduces of ``size`` bytes on all ranks."""
    import torch

    tensor = torch.zeros(size // 4, device=world.device)
    once_s = max(_time(tensor, world, all_reduce) for _ in range(_WARMUP))
    calls = max(world.from_main(round(seconds / max(once_s, 1e-9))), _FEWEST)
    own = torch.tensor([_time(tensor, world, all_reduce) for _ in range(min(calls, _MOST))])
    slowest = torch.tensor(world.gather(own.tolist())).max(0).values * 1e6
    low, high = slowest.quantile(torch.tensor([0.1, 0.9])).tolist()
    us = statistics.median(slowest.tolist())
    algorithm = size / us / 1000
    return Measured(size, len(own), us, low, high, algorithm, algorithm * bus_factor(world.size))


def bus_factor(processes: int) -> float:
    """Bus bandwidth over algorithm bandwidth of an all-reduce, as nccl-tests (PERFORMANCE.md) defines it."""
    return 2 * (processes - 1) / processes


def _time(tensor: torch.Tensor, world: World, all_reduce: AllReduce) -> float:
    """Seconds of one call, which begins on all ranks at about the same time."""
    import torch

    world.barrier()
    begin = time.perf_counter()
    all_reduce(tensor)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - begin


def _write(folder: Path, name: str, processes: int, results: list[Measured]) -> None:
    lines = [json.dumps({"processes": processes, "through": name, **asdict(one)}) for one in results]
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    rows = [("message", "us", "10th-90th", "algorithm GB/s", "bus GB/s")]
    rows += [
        (
            _size(one.bytes),
            f"{one.us:,.1f}",
            f"{one.low_us:,.1f}-{one.high_us:,.1f}",
            f"{one.algorithm_gb_per_s:.3f}",
            f"{one.bus_gb_per_s:.3f}",
        )
        for one in results
    ]
    (folder / "table.md").write_text(f"{processes} processes, {name}\n\n{table(rows)}\n", "utf-8")


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} B"
