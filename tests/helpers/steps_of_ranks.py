"""Some steps of `ranks` processes on one device: the product's own step, with a process group of the test's choice."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from worldsize import parallel
from worldsize.config.recipe import Recipe
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.models import factory
from worldsize.training import build
from worldsize.training.gradients import GradientComputer, StepHooks
from worldsize.training.precision import Precision
from worldsize.training.step import StepRunner

STEPS, SIZE, CLASSES = 3, 32, 10


def weights_after(ranks: int, device: str, backend: str | None, folder: Path) -> dict[str, torch.Tensor]:
    """The weights, on the CPU, after `STEPS` steps of ddp; of `single` without a ``backend``."""
    folder.mkdir()
    mp.start_processes(_rank, (ranks, device, backend, str(folder)), nprocs=ranks, start_method="spawn")
    return torch.load(folder / "weights.pt", weights_only=True)


def _rank(rank: int, ranks: int, device_name: str, backend: str | None, folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_name)
    control = None
    if backend is not None:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    values = {
        "model": {"name": "resnet18", "compile": False},
        "global_batch": 16,
        "micro_batch": 4,
        "precision": "fp64",
        "deterministic": True,
        "optimizer": {"lr": 0.002},
        "parallel": {"strategy": "single" if backend is None else "ddp"},
    }
    recipe = Recipe.model_validate(values)
    torch.use_deterministic_algorithms(True)
    parallel._check_processes = lambda strategy, world_size: None  # a run of one process would need no ddp
    plan = batch_plan.plan(recipe, ranks)
    world = World(RankInfo("torchrun", rank, ranks, rank, ranks, ("127.0.0.1", 1)), device, backend, 1, control)
    network = factory.build(recipe, CLASSES, device, torch.float64).train()
    state = build.build_state(recipe, network, plan, world, Precision("fp64", device), 10)
    runner = StepRunner(GradientComputer(recipe, plan, rank, device, state))
    feed = Feed(_batches(plan, rank), device)
    for step in range(STEPS):
        runner.run(feed, step, 0.002, StepHooks(launched=feed.prefetch))
    with state.consensus(world, STEPS):
        if rank == 0:
            torch.save({name: tensor.cpu() for name, tensor in network.state_dict().items()}, f"{folder}/weights.pt")
    if backend is not None:
        dist.destroy_process_group()


def _batches(plan: batch_plan.BatchPlan, rank: int) -> Iterator[Batch]:
    """This rank's part of the same samples at every number of ranks."""
    for step in range(STEPS):
        dice = torch.Generator().manual_seed(step)
        pixels = torch.randint(0, 256, (plan.global_batch, SIZE, SIZE, 3), dtype=torch.uint8, generator=dice)
        labels = torch.randint(0, CLASSES, (plan.global_batch,), generator=dice)
        for forward in range(plan.accumulation):
            first = plan.first(0, rank, forward)
            part = slice(first, first + plan.forward_batch)
            yield Batch(pixels[part], labels[part], torch.arange(plan.global_batch)[part].numpy())
