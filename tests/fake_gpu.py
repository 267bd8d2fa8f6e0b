"""Runs the product's own step, evaluation, snapshot and restore on fake CUDA tensors, and prints where the host would wait.

A fake tensor has a shape, a type and a device, and no memory, so this needs no GPU. An operation on tensors of two devices
fails as on a GPU. Usage: ``python fake_gpu.py``; with LD_PRELOAD=fake_gpu.so (compiled from fake_gpu.c), which lets
autograd believe in a GPU, also the backward pass. Prints one JSON object: by case, the list of waits.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import worldsize
from worldsize import assemble, batch, checkpoint, evaluate, model, optim
from worldsize.compute import Compute
from worldsize.data.feed import Feed
from worldsize.data.loader import Batch
from worldsize.data.pixels import Normalise
from worldsize.place import Place
from worldsize.precision import Precision
from worldsize.recipe import Recipe
from worldsize.step import StepRunner
from worldsize.world import World

GPU = torch.device("cuda", 0)
SOURCES = Path(worldsize.__file__).parent
FORWARD_BATCH, SIZE, RANKS = 4, 64, 4


class Waits(TorchDispatchMode):
    """Collects the operations that make the host wait for the device, with the line of worldsize behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(function)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if "_local_scalar_dense" in name or "nonzero" in name or self._copies(name, tensors, args, kwargs):
            self.note(name.removeprefix("aten.").split(".")[0])
        return function(*args, **kwargs)

    def note(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(SOURCES))]
        place = f"{Path(frames[-1].filename).relative_to(SOURCES)}:{frames[-1].name}" if frames else "elsewhere"
        self.found.append(f"{place} {what}")

    @staticmethod
    def _copies(name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
        """Whether it copies between devices and waits for the end of it."""
        if "_to_copy" in name and tensors:
            target = kwargs.get("device")
            return (
                target is not None and torch.device(target).type != tensors[0].device.type and not kwargs.get("non_blocking")
            )
        if "copy_.default" in name and len(tensors) > 1:
            blocking = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
            return tensors[0].device.type != tensors[1].device.type and blocking
        return False


def note(what: str) -> None:
    """Tell the active `Waits` of a wait that no operation on tensors shows."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Waits):
            mode.note(what)


class Stream:
    """Takes the place of `torch.cuda.Stream`."""

    def __init__(self, device: torch.device | None = None) -> None:
        return

    def wait_stream(self, other: Stream) -> None:
        return

    def synchronize(self) -> None:
        note("synchronize")


class Samples:
    """Takes the place of the loader: batches on the host."""

    class broken:
        known: frozenset[str] = frozenset()

        @staticmethod
        def share(_: World) -> None:
            return

    def __iter__(self) -> Iterator[Batch]:
        while True:
            pixels = torch.empty(FORWARD_BATCH, SIZE, SIZE, 3, dtype=torch.uint8)
            yield Batch(pixels, torch.empty(FORWARD_BATCH, dtype=torch.int64), np.arange(FORWARD_BATCH))

    def evaluation(self, rank: int, world_size: int, batch: int) -> Iterator[Batch]:
        return itertools.islice(iter(self), 2)


def replace_what_needs_a_device(gpus: int) -> None:
    """Functions of torch that ask the driver, and kernels without a meta implementation (torch 2.12)."""
    stamp = lambda device: time.perf_counter()  # noqa: E731
    worldsize.clock.stamp = worldsize.parallel.base.stamp = stamp
    torch.cuda.is_bf16_supported = lambda *a: True
    torch.cuda.get_device_capability = lambda *a: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = lambda device=None: Stream()
    torch.cuda.stream = lambda stream: nullcontext()
    torch.Tensor.record_stream = lambda tensor, stream: None
    empty = torch.empty
    torch.empty = lambda *a, pin_memory=False, **k: empty(*a, **k)
    torch.cuda.default_generators = (torch.Generator(),)
    torch._C._select_conv_backend = lambda *a, **k: torch._C._ConvBackend.Cudnn
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_sgd_", lambda *a, **k: None, "Meta")
    KEPT.append(library)
    torch._C._ensureCUDADeviceGuardSet()
    if gpus:
        preloaded = ctypes.CDLL(os.environ["LD_PRELOAD"])
        ctypes.c_int.in_dll(preloaded, "fake_gpus").value = gpus


KEPT: list[Any] = []


def on_gpu(network: nn.Module) -> nn.Module:
    """The network with fake tensors on the GPU; `Module.to` cannot change the class of its parameters."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=GPU)

    for module in network.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(fake(parameter))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fake(buffer)
    return network


class Case:
    """A process of a run with this recipe, on a fake GPU."""

    def __init__(self, network: nn.Module, recipe: Recipe) -> None:
        size = 1 if recipe.parallel.strategy == "auto" else RANKS
        plan = batch.plan(recipe, size)
        self.world = World(Place("none", 0, size, 0, size), GPU, None if size == 1 else "nccl", 1)
        self.model = on_gpu(network)
        number_format = Precision(recipe.precision, GPU)
        self.state = assemble.build_state(recipe, self.model, plan, self.world, number_format, 10)
        self.optimizer = self.state.optimizer
        assert self.state.scaler.is_enabled() == (recipe.precision == "fp16" and torch.cuda.is_available())
        normalise = Normalise(recipe.data, GPU, number_format.weights)
        self.compute = Compute(recipe, plan, 0, GPU, self.state, number_format, normalise)
        self.batches = Feed(iter(Samples()), GPU)

    def step(self) -> None:
        computed, norm = StepRunner(self.compute).run(self.batches, 0, 0.1)
        assert computed.sums.device == norm.device == GPU

    def forward(self) -> None:
        """A step without its backward pass, with gradients of zeros."""
        with self.compute.precision.autocast(), torch.no_grad():
            logits = self.state.strategy.module(self.compute.normalise(next(self.batches).pixels))
        assert logits.device == GPU
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def evaluate(self) -> None:
        compute = self.compute
        evaluate.evaluate(self.model, Samples(), compute.normalise, compute.precision, self.world, FORWARD_BATCH)

    def snapshot(self) -> None:
        with self.state.consensus(self.world, 1):
            self.weights = checkpoint.copy(self.model.state_dict())
        self.own = self.state.gather(self.world)
        self.saved = checkpoint.copy(optim.state_tensors(self.optimizer, self.model))
        assert {t.device.type for t in [*self.weights.values(), *self.own.values(), *self.saved.values()]} == {"cpu"}

    def restore(self) -> None:
        state = {"optimizer": type(self.optimizer).__name__, "scaler": {}, "step": 1, "world_size": self.world.size}
        self.state.restore(checkpoint.Snapshot(self.weights, self.saved, self.own, state, ""), self.world)
        devices = {
            (kind, t.device.type) for state in self.optimizer.state.values() for kind, t in state.items() if t is not None
        }
        assert devices in ({("momentum_buffer", "cuda")}, {("step", "cuda"), ("exp_avg", "cuda"), ("exp_avg_sq", "cuda")}), (
            devices
        )


def known_waits() -> list[str]:
    """What `Waits` finds in operations that wait."""
    with Waits() as waits:
        device, host = torch.zeros(2, device=GPU), torch.zeros(2)
        device.cpu()
        host.to(GPU)
        device.copy_(host)
        torch.tensor(1.0, device=GPU)
        device.to("cpu", non_blocking=True)  # does not wait
        with suppress(DataDependentOutputException):
            device.sum().item()
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
    """By part, the waits. The first step is not counted: an optimizer creates its state in it."""
    found = {}
    step = case.step if complete else case.forward
    step()
    for name, part in (("step", step), ("evaluate", case.evaluate), ("snapshot", case.snapshot)):
        with Waits() as waits:
            part()
        found[name] = waits.found
    case.restore()
    with Waits() as waits:
        step()
    found["step after restore"] = waits.found
    return found


def recipes() -> dict[str, Recipe]:
    """The cases by name."""
    found = {}
    small = {"model": {"name": "resnet18"}}
    for precision, name in itertools.product(("fp32", "tf32", "bf16", "fp16"), ("sgd", "adamw")):
        values = {"precision": precision, "optimizer": {"name": name, "clip_norm": 1.0}, "label_smoothing": 0.1}
        found[f"{precision} {name}"] = Recipe.model_validate(small | values | {"global_batch": 8, "micro_batch": 4})
    ghosts = {"global_batch": 8, "micro_batch": 2, "forward_batch": 4, "precision": "bf16"}
    found["ghost"] = Recipe.model_validate(small | ghosts)
    for strategy in ("bitwise", "adasum", "localsgd"):
        for precision in ("bf16", "fp16"):
            values = {"precision": precision, "global_batch": 32, "micro_batch": 4, "parallel": {"strategy": strategy}}
            found[f"{precision} {strategy}"] = Recipe.model_validate(small | values)
    return found


def main() -> None:
    torch.set_num_threads(1)
    complete = "LD_PRELOAD" in os.environ
    networks = {name: model.build(recipe, 10, torch.device("cpu"), torch.float32) for name, recipe in recipes().items()}
    evaluate._reduce = lambda sums, *rest: sums
    found: dict[str, Any] = {}
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        replace_what_needs_a_device(8 if complete else 0)
        if not complete:
            found["known"] = {"operations": known_waits()}
            found["fed"] = [fed(prefetches) for prefetches in ("111", "000", "202", "011")]
        for name, recipe in recipes().items():
            found[name] = waits_of(Case(networks[name], recipe), complete)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
