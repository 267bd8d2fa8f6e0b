"""What the host does to launch a training step of ResNet-50: operations given to the device, and the host's time for them.

    python benchmarks/step_launches.py [--compile]

The operations are counted on fake CUDA tensors, as tests/gpu/test_fake_gpu.py uses them: needs gcc and no GPU. The time and
torch's profiler are a CPU's, with a ResNet-50 so thin and images so small that a step is little more than launching. In
turns with the network's own step, so that load of the machine affects both. With --compile also compiled, which takes
minutes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.config
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.resnet import Bottleneck, ResNet

from worldsize.config.recipe import Recipe
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.training import build
from worldsize.training.gradients import GradientComputer, StepHooks
from worldsize.training.precision import Precision
from worldsize.training.step import StepRunner

HELPERS = Path(__file__).resolve().parents[1] / "tests" / "helpers"
SAMPLES, SIZE, CLASSES, STEPS, ROUNDS = 16, 32, 10, 3, 5
FORMS = {"one micro-batch": 1, "8 micro-batches in a pass": 8}
ALLOCATES = ("empty", "new_empty", "_unsafe_view", "as_strided_", "record_stream")


class Launches(TorchDispatchMode):
    """Counts the operations that compute on the GPU, by name; not views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name().removeprefix("aten::")
        returned = [one.alias_info for one in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if function.namespace == "aten" and not is_view and not name.startswith(ALLOCATES):
            self.found[name] += 1
        return result


def recipe(groups: int, precision: str, compiled: bool = False) -> Recipe:
    sizes = {"model": {"compile": compiled}} | {
        "global_batch": SAMPLES,
        "micro_batch": SAMPLES // groups,
        "forward_batch": SAMPLES,
    }
    return Recipe.model_validate(sizes | {"precision": precision, "label_smoothing": 0.1})


def counted() -> None:
    """Count the operations of a step of each form, on a fake GPU; prints rows. Needs the preloaded library."""
    sys.path.append(str(HELPERS))
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fake_device
    import fake_gpu
    from worldsize.models import factory

    fake_device.FORWARD_BATCH = SAMPLES
    networks = [factory.build(recipe(1, "bf16"), CLASSES, torch.device("cpu"), torch.float32) for _ in FORMS]
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        fake_device.replace_what_needs_a_device(8)
        for (name, groups), network in zip(FORMS.items(), networks, strict=True):
            case = fake_gpu.Case(network, recipe(groups, "bf16"))
            case.step()  # the optimizer creates its state
            with Launches() as launches:
                case.step()
            norms = sum(count for name, count in launches.found.items() if "batch_norm" in name)
            copies = sum(launches.found[kind] for kind in ("cat", "_to_copy", "copy_"))
            print(f"| {name} | {launches.found.total():,} | {norms:,} | {copies:,} |", flush=True)
            case.meter.close()


def batches() -> Iterator[Batch]:
    pixels = torch.zeros(SAMPLES, SIZE, SIZE, 3, dtype=torch.uint8)
    while True:
        yield Batch(pixels, torch.zeros(SAMPLES, dtype=torch.int64), np.arange(SAMPLES))


def product(groups: int, compiled: bool = False) -> Callable[[], object]:
    """A step of worldsize on the thin network, in one forward pass."""
    asked, device = recipe(groups, "fp32", compiled), torch.device("cpu")
    plan = BatchPlan(SAMPLES, SAMPLES // groups, 1, groups=groups)
    world = World(RankInfo("none", 0, 1, 0, 1), device, None, 1)
    state = build.build_state(asked, thin(), plan, world, Precision("fp32", device), 100)
    runner, feed = StepRunner(GradientComputer(asked, plan, 0, device, state)), Feed(batches(), device)
    return lambda: runner.run(feed, 0, 0.1, StepHooks(launched=feed.prefetch))


def bare() -> Callable[[], object]:
    """The network's own step on constant tensors."""
    network, images, labels = thin(), torch.zeros(SAMPLES, 3, SIZE, SIZE), torch.zeros(SAMPLES, dtype=torch.int64)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, foreach=True)

    def step() -> None:
        functional.cross_entropy(network(images), labels, label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def thin() -> ResNet:
    return ResNet(Bottleneck, [3, 4, 6, 3], num_classes=CLASSES, width_per_group=1)


def milliseconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin) / STEPS * 1000


def dispatched(step: Callable[[], object]) -> int:
    """The operations that torch's profiler sees in a step, with views and those that others call, and compiled kernels."""
    # Without acc_events, torch 2.12 warns.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    return sum(event.name.startswith("aten::") or "cpp_fused" in event.name for event in profiler.events() or ())


def main() -> None:
    torch.set_num_threads(1)
    if "LD_PRELOAD" in os.environ:
        counted()
        return
    print(
        "| worldsize's step, bf16 | operations on the GPU | of BatchNorm | copies and casts |\n| --- | ---: | ---: | ---: |",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fake_gpu.so", "libcuda.so.1"):
            subprocess.run(["gcc", "-shared", "-fPIC", "-o", f"{folder}/{name}", HELPERS / "fake_gpu.c"], check=True)
        variables = os.environ | {"LD_PRELOAD": f"{folder}/fake_gpu.so", "LD_LIBRARY_PATH": folder}
        subprocess.run([sys.executable, __file__], env=variables, check=True)
    steps = {"bare": bare()} | {name: product(groups) for name, groups in FORMS.items()}
    if "--compile" in sys.argv:
        torch._inductor.config.cpp.enable_kernel_profile = True
        steps |= {f"{name}, compiled": product(groups, True) for name, groups in FORMS.items()}
    rounds = [{name: milliseconds(step) for name, step in steps.items()} for _ in range(ROUNDS + 1)][1:]
    print("\n| thin network on a CPU, fp32 | operations seen by the profiler | host ms | relative to bare |", flush=True)
    print("| --- | ---: | ---: | ---: |")
    for name, step in steps.items():
        spent = statistics.median(one[name] for one in rounds)
        ratio = statistics.median(one[name] / one["bare"] for one in rounds)
        print(f"| {name} | {dispatched(step):,} | {spent:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
