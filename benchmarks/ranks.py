"""What one rank does per step and per checkpoint in a run of many ranks, measured without the others.

    python benchmarks/ranks.py [RANKS ...]

torch's fake process group takes the messages of this process and delivers none, so this measures the work of one process
(its host time and its memory), not a network. ResNet-50's real state, micro-batches of 32, one per rank. Rank 0 does the
most; the others' work does not depend on the number of ranks. In a checkpoint of Adasum each rank has its own optimizer,
with local SGD its own weights too.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from worldsize import checkpoint
from worldsize.bench import tables
from worldsize.checkpoint import writer
from worldsize.config.recipe import Checkpoint as Retention
from worldsize.config.recipe import Recipe
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.models import factory
from worldsize.parallel.base import Exchange
from worldsize.training.gradients import Computed
from worldsize.training.rank_decisions import RankDecisions
from worldsize.training.resume import check_ranks
from worldsize.training.step_metrics import StepMetrics

CPU = torch.device("cpu")
STEPS = 100
MOST = 1.2  # times what it costs among 8 ranks
# What may grow by more: milliseconds per rank, on which rank (None: on each), and why.
GROWS = {
    "start": (0.05, None, "each rank reads and compares what the others send, once per run"),
    "metrics": (0.003, 0, "rank 0 adds up the losses of all micro-batches exactly"),
    "save": (0.6, 0, "rank 0 receives a report of each rank and writes its line of the manifest, in the background"),
    "load": (0.1, 0, "rank 0 checks the size of each rank's file"),
}


class Alone:
    """The strategy's part of `StepMetrics`: nothing is sent."""

    local_gradients = False
    exchange = Exchange(CPU)


def received(tensor: torch.Tensor, everyone: list[torch.Tensor] | None, **_: object) -> None:
    """Takes the place of `dist.gather`: all ranks send what this one does."""
    for other in everyone or ():
        other.copy_(tensor)


def milliseconds(work: Callable[[], object], times: int = 5) -> float:
    """The least, because the load of a shared machine only adds to it."""
    work()
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        spent.append((time.perf_counter() - begin) * 1000)
    return min(spent)


def measure(ranks: int, rank: int) -> dict[str, float]:
    world, found = steps(ranks, rank)
    network = factory.build(Recipe(), 1000, CPU, torch.float32)
    for strategy in ("ddp", "adasum", "localsgd"):
        found |= checkpoints(world, network, strategy)
    return found


def steps(ranks: int, rank: int) -> tuple[World, dict[str, float]]:
    """The world of this rank, and what its start and its steps cost outside of the computation."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    dist.gather = received
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    control = dist.new_group(backend="fake", timeout=timedelta(seconds=60))
    world = World(RankInfo("torchrun", rank, ranks, 0, 8, ("127.0.0.1", 1)), CPU, "nccl", 1, control)
    World.gather = lambda self, value: [pickle.loads(pickle.dumps(value)) for _ in range(self.size)]  # type: ignore[method-assign]
    check_ranks(world, {"data": {"train": "0" * 64}, "precision": "bf16"}, same_bits=False)
    found = {"start ms": (time.perf_counter() - begin) * 1000}
    if rank:  # the others get rank 0's steps; no message arrives here
        World.from_main = lambda _, value: value  # type: ignore[method-assign]
    decisions = RankDecisions(world, largest_ring=0)

    def decide() -> None:
        for _ in range(STEPS):
            decisions.propose(False, True, False, 0)
            decisions.decide()

    found["decisions ms/step"] = milliseconds(decide) / STEPS
    meter = StepMetrics(world, BatchPlan(ranks * 32, 32, ranks), Alone())
    computed = Computed(torch.ones(1, 2, dtype=torch.float64), [7], [], [])

    def metrics() -> None:
        for step in range(STEPS):
            meter.add(step, 0.0, 0.1, computed, torch.tensor(1.0))
        meter.collect(0)

    found["metrics ms/step"] = milliseconds(metrics) / STEPS
    return world, found


def checkpoints(world: World, network: torch.nn.Module, strategy: str) -> dict[str, float]:
    """Saving and loading this rank's part of a checkpoint; the other ranks' files are links to one file."""
    weights, momentum = network.state_dict(), {f"m/{name}": torch.zeros_like(p) for name, p in network.named_parameters()}
    own = {f"norm/{name}": tensor for name, tensor in factory.RunningStatistics(network).tensors().items()}
    if strategy != "ddp":
        own |= {f"strategy/{name}": tensor for name, tensor in momentum.items()}
    if strategy == "localsgd":
        own |= {f"strategy/weight/{name}": tensor.detach().clone() for name, tensor in network.named_parameters()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        team = writer.Team(world.control, world.rank, world.size, "token")
        writing = writer.Writer(folder, Retention(keep=1), team)
        theirs = folder / "theirs"
        save_file(checkpoint.copy(own), theirs)
        entry = {"bytes": theirs.stat().st_size, "sha256": checkpoint.sha256(theirs)}
        states = itertools.count(1)

        def told(message: torch.Tensor, src: int, **_: object) -> None:
            text = json.dumps({"files": {checkpoint.rank_file(src): entry}}).encode()
            message.zero_()[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

        def save() -> float:
            step = next(states)
            temporary = folder / f"step-{step:08d}.tmp-token-{step}"
            temporary.mkdir()
            for rank in range(world.size):
                if rank != world.rank:
                    (temporary / checkpoint.rank_file(rank)).hardlink_to(theirs)
            begin = time.perf_counter()
            main = (checkpoint.copy(weights), checkpoint.copy(momentum)) if world.is_main else ({}, {})
            copied = checkpoint.copy(own)
            writing.save(checkpoint.Snapshot(*main, {world.rank: copied}, {"step": step}, ""))
            writing.wait()
            assert writing.failed is None, writing.failed
            return (time.perf_counter() - begin) * 1000

        dist.recv = told
        save()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        saved = min(save() for _ in range(3))
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        found = {f"save {strategy} ms": saved, f"save {strategy} MiB": memory}
        if world.is_main:
            newest = checkpoint.list_checkpoints(folder)[0]
            found[f"load {strategy} ms"] = milliseconds(lambda: checkpoint.read(newest, 0), times=3)
            found[f"load {strategy} as rank 1 ms"] = milliseconds(lambda: checkpoint.read(newest, 1), times=3)
    return found


def unexplained(few: dict[str, float], many: dict[str, float], ranks: int, rank: int, noise: float = 1.0) -> list[str]:
    """The costs of ``rank`` among ``ranks`` that are above `MOST` times those among few, and not in `GROWS`.

    Args:
        noise: factor for the load of a shared machine.
    """
    found = []
    for name, value in many.items():
        per_rank, grows_on, _ = GROWS.get(name.split()[0], (0.0, None, ""))
        grows = per_rank if grows_on in (None, rank) and "as rank" not in name else 0.0
        if " ms" in name and value > noise * (MOST * few[name] + grows * ranks):
            found.append(f"{name}, rank {rank}: {few[name]:.3f} among few, {value:.3f} among {ranks:,}")
    return found


def main(sizes: list[str]) -> None:
    """Print one row for each measurement and rank, one column for each number of ranks."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    rows: dict[str, list[str]] = {}
    few: dict[str, dict[str, float]] = {}
    high: list[str] = []
    for ranks in sizes:
        for rank in ("0", "1"):
            command = [sys.executable, __file__, "--measure", ranks, rank]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            high += unexplained(few.setdefault(rank, found), found, int(ranks), int(rank))
            for name, value in found.items():
                row = name if "as rank" in name else f"{name}, rank {rank}"
                rows.setdefault(row, []).append(f"{value:.3f}" if "/step" in name else f"{value:.0f}")
    print(tables.table([["ranks", *sizes], *([name, *cells] for name, cells in rows.items())]))
    print("\n".join(f"above {MOST} times, without a known reason: {line}" for line in high))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]))))
    elif sys.argv[1:2] == ["--steps"]:
        print(json.dumps(steps(int(sys.argv[2]), int(sys.argv[3]))[1]))
    else:
        main(sys.argv[1:] or ["8", "512", "4096"])
