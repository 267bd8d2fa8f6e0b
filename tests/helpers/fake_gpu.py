"""Runs the product's own step, evaluation, snapshot and restore on fake CUDA tensors, and prints where the host would wait.

A fake tensor has a shape, a type and a device, and no memory, so this needs no GPU. An operation on tensors of two devices
fails as on a GPU. Usage: ``python fake_gpu.py CASE...``; with LD_PRELOAD=fake_gpu.so (compiled from fake_gpu.c), which lets
autograd believe in a GPU, also the backward pass. Prints one JSON object: by case, the list of waits.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import worldsize
from worldsize.config.recipe import Recipe
from worldsize.data.augmentation.mixing import WIDTH
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.models import factory
from worldsize.parallel.ddp import compression
from worldsize.training import build, evaluation
from worldsize.training.asynchronous.worker import unflatten
from worldsize.training.gradients import GradientComputer, StepHooks
from worldsize.training.margins import Margins
from worldsize.training.precision import Precision
from worldsize.training.progress import Progress
from worldsize.training.saver import Saver
from worldsize.training.step import StepRunner
from worldsize.training.step_metrics import StepMetrics

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
        reads = "_local_scalar_dense" in name
        target = self._copied_to(name, tensors, args, kwargs)
        if (reads and tensors[0].is_cuda) or "nonzero" in name or target:
            self.note(name.removeprefix("aten.").split(".")[0] + (f" to {target}" if target else ""))
        return 1.0 if reads else function(*args, **kwargs)  # a fake tensor has no value

    def note(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(SOURCES))]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "elsewhere"
        self.found.append(f"{where} {what}")

    @staticmethod
    def _copied_to(name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> str | None:
        """The type of the device to which it copies from another one, if the host waits for the end of it."""
        if kwargs.get("non_blocking") or not tensors:
            return None
        source, target = tensors[0].device.type, None
        if "_to_copy" in name and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"]).type
        elif "copy_.default" in name and len(tensors) > 1 and not (len(args) > 2 and args[2]):
            source, target = tensors[1].device.type, tensors[0].device.type
        return target if target != source else None


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


class Graph:
    """Takes the place of `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        return

    def pool(self) -> tuple[int, int]:
        return 0, 0


class Event:
    """Takes the place of `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False) -> None:
        return

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        note("synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Done:
    """Takes the place of a future: that of the fake process group has no value, and torch's reads addresses."""

    def __init__(self, result: Any = None, devices: Any = None) -> None:
        self._result = result

    def set_result(self, result: Any) -> None:
        self._result = result

    def get_future(self) -> Done:
        return self

    def wait(self) -> None:
        return

    def then(self, work: Any) -> Done:
        return Done(work(self))

    def value(self) -> Any:
        return self._result


class Bucket:
    """Takes the place of `dist.GradBucket`: some parameters and their gradients, flat."""

    def __init__(self, parameters: list[nn.Parameter], last: bool) -> None:
        self._parameters, self._last = parameters, last
        self._buffer = torch.cat([p.grad.reshape(-1) for p in parameters])

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


class Ddp(nn.Module):
    """Takes the place of DistributedDataParallel, whose reducer is C++: passes buckets of gradients to the hook."""

    BUCKET = 20  # parameters

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        self._synchronized = True
        self._ready: list[nn.Parameter] = []
        self._count = len(list(module.parameters()))
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def forward(self, *arguments: torch.Tensor) -> Any:
        return self.module(*arguments)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._synchronized = False
        try:
            yield
        finally:
            self._synchronized = True

    def register_comm_hook(self, state: object, hook: Any) -> None:
        self._hook = hook

    def _arrived(self, parameter: nn.Parameter) -> None:
        self._ready.append(parameter)
        if len(self._ready) < self._count:
            return
        ready, self._ready = self._ready, []
        if not self._synchronized:
            return
        starts = range(0, len(ready), self.BUCKET)
        buckets = [Bucket(ready[i : i + self.BUCKET], i == starts[-1]) for i in starts]
        for bucket, reduced in [(bucket, self._hook(None, bucket)) for bucket in buckets]:
            averaged = reduced.value()
            assert averaged.device == GPU and averaged.shape == bucket.buffer().shape


class Samples:
    """Takes the place of the loader: batches on the host, mixed or not."""

    def __init__(self, mixed: bool = False) -> None:
        self._mixed = mixed

    class broken:
        known: frozenset[str] = frozenset()

        @staticmethod
        def share(_: World) -> None:
            return

    def __iter__(self) -> Iterator[Batch]:
        while True:
            pixels = torch.empty(FORWARD_BATCH, SIZE, SIZE, 3, dtype=torch.uint8)
            labels, mix = torch.empty(FORWARD_BATCH, dtype=torch.int64), torch.ones(FORWARD_BATCH, WIDTH)
            yield Batch(pixels, labels, np.arange(FORWARD_BATCH), mix if self._mixed else None)

    def evaluation(self, rank: int, world_size: int, batch: int, crop: object = None) -> Iterator[Batch]:
        return itertools.islice(iter(self), 2)


def replace_what_needs_a_device(gpus: int) -> None:
    """Functions of torch that ask the driver, and kernels without a meta implementation (torch 2.12)."""
    torch.cuda.is_bf16_supported = lambda *a: True
    torch.cuda.get_device_capability = lambda *a: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Stream = Stream
    torch.cuda.Event = Event
    torch.cuda.set_device = lambda device: None
    torch.from_numpy = lambda array: torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)))
    World.to_main = lambda self, own: None  # as on a rank other than 0: rank 0 reads the values
    torch.cuda.current_stream = lambda device=None: Stream()
    torch.cuda.stream = lambda stream: nullcontext()
    torch.nn.parallel.DistributedDataParallel = Ddp
    compression.torch.futures.Future = Done
    all_reduce = dist.all_reduce

    def asynchronous(tensor: torch.Tensor, async_op: bool = False, **options: Any) -> Done | None:
        all_reduce(tensor, **options)
        return Done([tensor]) if async_op else None

    dist.all_reduce = asynchronous
    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = lambda graph, *a, **k: nullcontext()
    torch.Tensor.record_stream = lambda tensor, stream: None
    empty = torch.empty
    torch.empty = lambda *a, pin_memory=False, **k: empty(*a, **k)
    torch.cuda.default_generators = (torch.Generator(),)
    torch._C._select_conv_backend = lambda *a, **k: torch._C._ConvBackend.Cudnn
    library = torch.library.Library("aten", "IMPL")
    for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adamw_.tensor_lr"):
        library.impl(name, lambda *a, **k: None, "Meta")
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
        self.meter = StepMetrics(self.world, plan, self.state.strategy)
        self.saver = Saver(recipe.checkpoint, Path("nowhere"), self.world, self.state, "", {})
        self.saver._team = object()  # each rank writes its own state

    def step(self) -> None:
        self.meter.begin()
        computed, norm = StepRunner(self.compute).run(self.batches, 0, 0.1, StepHooks(launched=self.batches.prefetch))
        assert computed.sums.device == norm.device == GPU
        assert all(isinstance(stamp, Event) for wait in computed.waits for stamp in wait)
        self.state.margins.add(computed.answers)
        self.meter.add(1, 0.0, 0.1, computed, norm)

    def collect(self) -> None:
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
    parts = (("step", step), ("collect", case.collect), ("evaluate", case.evaluate), ("snapshot", case.snapshot))
    for name, part in parts:
        if name == "step" and case.compute.recipe.cuda_graphs:
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
    small = {"model": {"name": "resnet18"}}
    cases = [("fp32", "sgd"), ("tf32", "sgd"), ("bf16", "sgd"), ("fp16", "sgd"), ("bf16", "adamw"), ("fp16", "adamw")]
    cases += [("bf16", name) for name in ("rmsprop", "sgdw", "lars", "lamb", "muon")] + [("fp16", "lars"), ("fp64", "sgd")]
    for precision, name in cases:
        values = {"precision": precision, "optimizer": {"name": name, "clip_norm": 1.0}, "label_smoothing": 0.1}
        found[f"{precision} {name}"] = Recipe.model_validate(small | values | {"global_batch": 8, "micro_batch": 4})
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
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        replace_what_needs_a_device(8 if complete else 0)
        if not complete:
            found["known"] = {"operations": known_waits()}
            found["grant"] = {"operations": granted()}
            found["fed"] = [fed(prefetches) for prefetches in ("111", "000", "202", "011")]
        for name, recipe in cases.items():
            found[name] = waits_of(Case(networks[name], recipe), complete)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
