"""What one rank does per step and per checkpoint in a run of many ranks, measured without the others.

    python benchmarks/ranks.py [RANKS ...]

torch's fake process group takes the messages of this process and delivers none, so this measures the work of one process
(its host time and its memory), not a network. ResNet-50's real state, micro-batches of 32, one per rank. Rank 0 does the
most; the others' work does not depend on the number of ranks.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from worldsize import checkpoint, model
from worldsize.batch import BatchPlan
from worldsize.bench import markdown
from worldsize.compute import Computed
from worldsize.control import Control
from worldsize.meter import Meter
from worldsize.parallel.base import Exchange
from worldsize.place import Place
from worldsize.recipe import Recipe
from worldsize.state import gather
from worldsize.world import World

CPU = torch.device("cpu")
STEPS = 100


class Alone:
    """The strategy's part of `Meter`: nothing is sent."""

    local_gradients = False
    exchange = Exchange(CPU)


def received(tensor: torch.Tensor, everyone: list[torch.Tensor] | None, **_: object) -> None:
    """Takes the place of `dist.gather`: all ranks send what this one does."""
    for other in everyone or ():
        other.copy_(tensor)


def milliseconds(work: Callable[[], object], times: int = 5) -> float:
    """The median."""
    work()
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        spent.append((time.perf_counter() - begin) * 1000)
    return statistics.median(spent)


def measure(ranks: int, rank: int) -> dict[str, float]:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    dist.gather = received
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    control = dist.new_group(backend="fake", timeout=timedelta(seconds=60))
    world = World(Place("torchrun", rank, ranks, 0, 8, ("127.0.0.1", 1)), CPU, "nccl", 1, control)
    found = {"start ms": (time.perf_counter() - begin) * 1000}
    if rank:  # the others get rank 0's steps; no message arrives here
        World.from_main = lambda _, value: value  # type: ignore[method-assign]
    decisions = Control(world, largest_ring=0)

    def decide() -> None:
        for _ in range(STEPS):
            decisions.propose(False, True, False, 0)
            decisions.decide()

    found["decisions ms/step"] = milliseconds(decide) / STEPS
    meter = Meter(world, BatchPlan(ranks * 32, 32, ranks), Alone())
    computed = Computed(torch.ones(1, 2, dtype=torch.float64), [7], 0.0)

    def metrics() -> None:
        for step in range(STEPS):
            meter.add(step, 0.0, 0.1, computed, torch.tensor(1.0))
        meter.collect(0)

    found["metrics ms/step"] = milliseconds(metrics) / STEPS
    network = model.build(Recipe(), 1000, CPU, torch.float32)
    statistics_of = model.RunningStatistics(network)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["checkpoint ms"] = milliseconds(lambda: gather(checkpoint.copy(statistics_of.tensors()), world), times=1)
    found["checkpoint MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return found


def main(sizes: list[str]) -> None:
    rows: list[list[str]] = []
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    for ranks in sizes:
        for rank in ("0", "1"):
            command = [sys.executable, __file__, "--measure", ranks, rank]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            rows = rows or [["ranks", "rank", *found]]
            cells = (f"{value:.3f}" if "/step" in name else f"{value:.0f}" for name, value in found.items())
            rows.append([ranks, rank, *cells])
    print(markdown.table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main(sys.argv[1:] or ["8", "512", "4096"])
