"""Runs the product's own step, evaluation, snapshot and restore on fake CUDA tensors, and prints where the host would wait.

A fake tensor has a shape, a type and a device, and no memory, so this needs no GPU. An operation on tensors of two devices
fails as on a GPU. Usage: ``python fake_gpu.py CASE...``; with LD_PRELOAD=fake_gpu.so (compiled from fake_gpu.c), which lets
autograd believe in a GPU, also the backward pass. Prints one JSON object: by case, the list of waits.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fake_device import FORWARD_BATCH, GPU, RANKS, SIZE, Event, Samples, Stream, Waits, on_gpu, replace_what_needs_a_device
from worldsize.config.recipe import Recipe
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.models import factory
from worldsize.training import build, evaluation
from worldsize.training.asynchronous.worker import unflatten
from worldsize.training.gradients import GradientComputer, StepHooks
from worldsize.training.margins import Margins
from worldsize.training.precision import Precision
from worldsize.training.progress import Progress
from worldsize.training.saver import Saver
from worldsize.training.step import StepRunner
from worldsize.training.step_metrics import StepMetrics


class Case:
    """A process of a run with this recipe, on a fake GPU."""

    def __init__(self, network: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        size = 1 if recipe.parallel.strategy == "auto" else RANKS
        plan = batch_plan.plan(recipe, size)
        self.world = World(RankInfo("none", 0, size, 0, size), GPU, None if size == 1 else "nccl", 1)
        self.model = on_gpu(network)
        number_format = Precision(recipe.precision, GPU)
        state = build.build_state(recipe, self.model, plan, self.world, number_format, 10)
        self.state = replace(state, margins=Margins(100))
        self.optimizer = self.state.optimizer
        assert self.state.scaler.is_enabled() == (recipe.precision == "fp16" and torch.cuda.is_available())
        self.compute = GradientComputer(recipe, plan, 0, GPU, self.state)
        self.batches = Feed(iter(Samples(recipe.augment.mixes)), GPU, recipe.data.device_prefetch)
        self.meter = StepMetrics(self.world, plan, self.state.strategy, deferred=True)
        self.saver = Saver(recipe.checkpoint, Path("nowhere"), self.world, self.state, "", {})
        self.saver._team = object()  # each rank writes its own state

    def step(self) -> None:
        self.meter.begin()
        computed, norm = StepRunner(self.compute).run(self.batches, 0, 0.1, StepHooks(launched=self.batches.prefetch))
        assert computed.sums.device == norm.device == GPU
        assert all(isinstance(stamp, Event) for wait in (*computed.waits, *computed.copies) for stamp in wait)
        assert len(computed.copies) == (self.compute.plan.accumulation if self.recipe.data.device_prefetch else 0)
        self.state.margins.add(computed.answers)
        self.meter.add(1, 0.0, 0.1, computed, norm)

    def rehearse(self) -> list[int]:
        """The images of the forward passes before the first step, if there are any."""
        seen: list[int] = []
        with self.model.register_forward_pre_hook(lambda module, arguments: seen.append(len(arguments[0]))):
            self.state.strategy.prepare_first_step(lambda: self.compute.rehearse(SIZE))
        return seen

    def collect(self) -> None:
        self.meter.collect(0, rest=False)

    def read(self) -> None:
        """What was collected before."""
        self.meter.collect(0)

    def forward(self) -> None:
        """A step without its backward pass, with gradients of zeros."""
        batch = next(self.batches)
        with torch.no_grad():
            labels = batch.labels.to(GPU, non_blocking=True)
            losses, logits = self.state.strategy.module(batch.pixels, labels)
        assert losses.device == logits.device == GPU
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def evaluate(self) -> None:
        objective = self.state.objective
        evaluation.evaluate(self.model, Samples(), objective.normalise, objective.precision, self.world, FORWARD_BATCH)

    def snapshot(self) -> None:
        self.saved = self.saver.snapshot(Progress(step=1))
        parts = [self.saved.model, self.saved.optimizer, self.saved.average, *self.saved.ranks.values()]
        assert {tensor.device.type for part in parts for tensor in part.values()} == {"cpu"}

    def restore(self) -> None:
        before = self._places()
        with Waits():  # which answers when a value is read
            self.state.restore(replace(self.saved, samples={}), self.world)
        assert self._places() == before

    def _places(self) -> set[tuple[str, str]]:
        """The kinds of the optimizer's state, and where they are."""
        states = self.optimizer.state.values()
        return {(kind, tensor.device.type) for state in states for kind, tensor in state.items() if tensor is not None}


def known_waits() -> list[str]:
    """What `Waits` finds in operations that wait."""
    with Waits() as waits:
        device, host = torch.zeros(2, device=GPU), torch.zeros(2)
        device.cpu()
        host.to(GPU)
        device.copy_(host)
        torch.tensor(1.0, device=GPU)
        device[[0, 1]]  # torch copies the list to the device
        device.to("cpu", non_blocking=True)  # does not wait
        device.sum().item()
    return waits.found


def granted() -> list[str]:
    """The waits when a worker of an asynchronous run takes the weights that rank 0 sent to its host."""
    with Waits() as waits:
        unflatten(torch.zeros(30), [torch.zeros(2, 5, device=GPU) for _ in range(3)])
    return waits.found


def fed(prefetches: str) -> list[int]:
    """The batches that come out of a `Feed` of three; ``prefetches`` says how often to prefetch after each of them."""
    host = (Batch(torch.zeros(1, 8, 8, 3, dtype=torch.uint8), torch.zeros(1), np.array([i])) for i in range(3))
    feed, found = Feed(host, GPU), []
    for copied in feed:
        assert copied.pixels.device == copied.labels.device == GPU
        found.append(int(copied.indices[0]))
        for _ in range(int(prefetches[len(found) - 1])):
            feed.prefetch()
    return found


def waits_of(case: Case, complete: bool) -> dict[str, list[str]]:
    """By part, the waits. The first step is not counted: an optimizer creates its state in it, PowerSGD in the third."""
    found = {}
    step = case.step if complete else case.forward
    with Waits():
        for _ in range(3 if case.compute.recipe.parallel.compression == "powersgd" else 1):
            step()
    parts = (("step", step), ("collect", case.collect), ("read", case.read), ("evaluate", case.evaluate))
    parts += (("snapshot", case.snapshot),)
    for name, part in parts:
        if name == "step" and case.compute.state.graphs:
            part = lambda: [step() for _ in range(4)]  # captured, then replayed  # noqa: E731
        with Waits() as waits:
            part()
        found[name] = waits.found
    case.restore()
    with Waits() as waits:
        step()
    found["step after restore"] = waits.found
    case.meter.close()
    return found


def recipes() -> dict[str, Recipe]:
    """The cases by name."""
    found = {}
    small = {"model": {"name": "resnet18", "compile": False}}
    cases = [("fp32", "sgd"), ("tf32", "sgd"), ("bf16", "sgd"), ("fp16", "sgd"), ("bf16", "adamw"), ("fp16", "adamw")]
    cases += [("bf16", name) for name in ("rmsprop", "sgdw", "lars", "lamb", "muon", "nadamw", "lion")]
    cases += [("fp16", "lars"), ("fp64", "sgd")]
    for precision, name in cases:
        values = {"precision": precision, "optimizer": {"name": name, "clip_norm": 1.0}, "label_smoothing": 0.1}
        found[f"{precision} {name}"] = Recipe.model_validate(small | values | {"global_batch": 8, "micro_batch": 4})
    for name, clip in (("value", {"clip_value": 0.1}), ("adaptive", {"clip_agc": 0.01})):
        values = {"global_batch": 8, "micro_batch": 4, "precision": "bf16", "optimizer": clip}
        found[f"clip {name}"] = Recipe.model_validate(small | values)
    sharp = {"global_batch": 8, "micro_batch": 4, "precision": "bf16", "optimizer": {"sam_rho": 0.05}}
    found["sharpness"] = Recipe.model_validate(small | sharp)
    ghosts = {"global_batch": 8, "micro_batch": 2, "forward_batch": 4, "precision": "bf16"}
    found["ghost"] = Recipe.model_validate(small | ghosts)
    mixed = {"augment": {"mixup": 0.2, "cutmix": 1.0}, "loss": {"name": "bce"}}
    found["mixed"] = Recipe.model_validate(small | ghosts | mixed | {"average": {"name": "ema"}})
    found["no prefetch"] = Recipe.model_validate(small | ghosts | mixed | {"data": {"device_prefetch": False}})
    for name, precision in (("sgd", "bf16"), ("sgd", "fp16"), ("adamw", "fp16")):
        values = {"precision": precision, "optimizer": {"name": name, "clip_norm": 1.0}, "cuda_graphs": True} | mixed
        found[f"graphs {precision} {name}"] = Recipe.model_validate(small | values | {"global_batch": 8, "micro_batch": 4})
    own = {"model": {"name": "worldsize:cifarnet", "compile": False}, "cuda_graphs": True}
    found["graphs bf16 cifarnet"] = Recipe.model_validate(ghosts | own)
    for strategy in ("ddp", "bitwise", "adasum", "localsgd"):
        for precision in ("bf16", "fp16"):
            values = {"precision": precision, "global_batch": 32, "micro_batch": 4, "parallel": {"strategy": strategy}}
            found[f"{precision} {strategy}"] = Recipe.model_validate(small | values)
    for kind in ("fp16", "powersgd"):
        parallel = {"strategy": "ddp", "compression": kind, "powersgd_start": 2}
        values = {"precision": "bf16", "global_batch": 32, "micro_batch": 4, "parallel": parallel}
        found[f"ddp {kind}"] = Recipe.model_validate(small | values)
    return found


def main() -> None:
    torch.set_num_threads(1)
    complete = "LD_PRELOAD" in os.environ
    cases = {name: recipes()[name] for name in sys.argv[1:]}
    networks = {
        name: factory.build(recipe, 10, torch.device("cpu"), Precision(recipe.precision, GPU).weights)
        for name, recipe in cases.items()
    }
    evaluation._reduce = lambda sums, *rest: sums
    found: dict[str, Any] = {}
    rehearsed: set[int] = set()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        replace_what_needs_a_device(8 if complete else 0)
        if not complete:
            found["known"] = {"operations": known_waits()}
            found["grant"] = {"operations": granted()}
            found["fed"] = [fed(prefetches) for prefetches in ("111", "000", "202", "011")]
        for name, recipe in cases.items():
            case = Case(networks[name], recipe)
            if complete:
                rehearsed |= set(case.rehearse())
            found[name] = waits_of(case, complete)
        if complete:
            found["rehearsed"] = sorted(rehearsed)
        else:
            found["streams"] = Stream.made
    print(json.dumps(found))


if __name__ == "__main__":
    main()
