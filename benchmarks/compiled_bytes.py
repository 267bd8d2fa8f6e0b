"""What the kernels of a compiled step read and write, relative to those of the same network compiled without worldsize.

    python benchmarks/compiled_bytes.py [MODEL]

Counted by torch's compiler from the sizes of the tensors, for a forward and a backward pass in bf16, compiled for a CPU;
nothing is timed. Kernels that are not convolutions or matrix products are limited by memory, so these bytes are their cost,
unless they read images in two orders of memory: convolutions have the channels last, so what is stored channel by channel is
slow to read with it. Takes some minutes. Uses internals of torch 2.12.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch._inductor.config
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer
from torch.nn import functional

from worldsize.config.recipe import Recipe
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.models import factory, ghost_batchnorm
from worldsize.training import build
from worldsize.training.precision import Precision

CPU, CLASSES, BATCH, SIZE = torch.device("cpu"), 1000, 32, 64


class Traffic:
    """Adds up the kernels of each graph that is compiled, and their bytes; convolutions and products apart.

    ``planar``: values with the shape of images that are stored channel by channel.
    """

    def __init__(self) -> None:
        self.kernels = self.fused_mb = self.other_mb = self.planar = 0.0
        generate = GraphLowering.codegen

        def counted(graph: GraphLowering) -> object:
            code = generate(graph)
            total, nodes, _ = graph.count_bytes()
            library = [node for node, _ in nodes if node.is_extern()]
            apart = sum(node.get_read_write_buffers_sizes() for node in library)
            self.kernels += len(nodes) - len(library)
            self.fused_mb += (total - apart) / 1e6
            self.other_mb += apart / 1e6
            stored = [buffer for name, buffer in graph.name_to_buffer.items() if name not in graph.removed_buffers]
            self.planar += sum(is_planar(buffer) for buffer in stored if isinstance(buffer, ComputedBuffer))
            return code

        GraphLowering.codegen = counted  # type: ignore[method-assign]

    def of(self, losses: Callable[[], torch.Tensor]) -> tuple[float, float, float, float]:
        self.kernels = self.fused_mb = self.other_mb = self.planar = 0.0
        losses().mean().backward()
        return self.kernels, self.fused_mb, self.other_mb, self.planar


def is_planar(buffer: ComputedBuffer) -> bool:
    """Whether it has the shape of several images with several channels and pixels, and its channels are not the last."""
    size, stride = ([int(number) for number in numbers] for numbers in (buffer.get_size(), buffer.get_stride()))
    return len(size) == 4 and min(size) > 1 and size[0] == BATCH and stride[1] != 1


def recipe(model: str, groups: int) -> Recipe:
    values = {"global_batch": BATCH, "micro_batch": BATCH // groups, "forward_batch": BATCH, "label_smoothing": 0.1}
    return Recipe.model_validate(
        values
        | {
            "model": {"name": model, "compile": True},
            "data": {"train_crop_size": SIZE},
            "precision": "bf16",
            "device": "cpu",
        }
    )


def bare(model: str) -> Callable[[], torch.Tensor]:
    network = factory.build(recipe(model, 1), CLASSES, CPU, torch.float32)
    compiled = torch.compile(network)
    images = torch.randn(BATCH, 3, SIZE, SIZE).to(memory_format=torch.channels_last)

    def losses() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.cross_entropy(compiled(images), torch.zeros(BATCH, dtype=torch.int64), label_smoothing=0.1)

    return losses


def product(model: str, groups: int) -> Callable[[], torch.Tensor]:
    """worldsize's objective with the BatchNorm that it has on GPUs."""
    asked = recipe(model, groups)
    network = factory.build(asked, CLASSES, CPU, torch.float32)
    plan = BatchPlan(BATCH, BATCH // groups, 1, groups=groups)
    world = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)
    module = build.build_state(asked, network, plan, world, Precision("bf16", CPU), 1).strategy.module
    ghost_batchnorm.split_norms(network, plan.micro_batch, groups)  # nothing is compiled before the first pass
    pixels = torch.zeros(BATCH, SIZE, SIZE, 3, dtype=torch.uint8)
    return lambda: module(pixels, torch.zeros(BATCH, dtype=torch.int64))[0]


def main() -> None:
    torch._inductor.config.force_disable_caches = True
    model = sys.argv[1] if len(sys.argv) > 1 else "resnet50"
    traffic = Traffic()
    forms = {"bare": bare(model)} | {f"{n} micro-batch{'es' * (n > 1)} in a pass": product(model, n) for n in (1, 4)}
    print(
        f"| {model}, compiled | kernels | their MB | relative to bare | MB of convolutions, products | channel by channel |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    first = 0.0
    for name, losses in forms.items():
        kernels, fused, other, planar = traffic.of(losses)
        first = first or fused
        print(f"| {name} | {kernels:.0f} | {fused:,.1f} | {fused / first:.3f} | {other:,.1f} | {planar:.0f} |", flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
