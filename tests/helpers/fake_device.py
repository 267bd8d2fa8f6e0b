"""What stands in for a GPU: its streams, events, graphs and messages; and where the host would wait for it."""

from __future__ import annotations

import ctypes
import itertools
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import worldsize
from worldsize.data.augmentation.mixing import WIDTH
from worldsize.data.loading.loader import Batch
from worldsize.distributed.world import World
from worldsize.parallel.ddp import compression

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
    """Takes the place of `torch.cuda.Stream`. ``made`` counts those that are not the current one."""

    made = 0

    def __init__(self, device: torch.device | None = None) -> None:
        Stream.made += device is not None

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

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._synchronized

    def register_comm_hook(self, state: object, hook: Any) -> None:
        self._hook = hook

    def _register_builtin_comm_hook(self, kind: object) -> None:
        self._hook = lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).then(lambda done: done.value()[0])

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
