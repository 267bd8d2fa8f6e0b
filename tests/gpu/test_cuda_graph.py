"""Steps as CUDA graphs, without a GPU: what a graph relies on, and that the steps around it compute the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paths import SMALL_NETWORK
from worldsize import parallel
from worldsize.config import command_line
from worldsize.config.recipe import Recipe
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models import factory, trusted_code
from worldsize.training import build, cuda_graph, unfreezing
from worldsize.training.gradients import GradientComputer, StepHooks
from worldsize.training.precision import Precision
from worldsize.training.step import StepRunner

CPU = torch.device("cpu")
STEPS, SIZE = 9, 16


class Replayed:
    """Takes the place of `cuda_graph.CudaGraph`: a capture runs nothing, a replay works on the memory of the capture."""

    memory: Callable[[], list[int]]
    replays = 0

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self._captured = self.memory()
        self._result: torch.Tensor | None = None

    def replay(self) -> torch.Tensor:
        type(self).replays += 1
        assert self.memory() == self._captured, "a tensor has moved since the capture"
        result = self._work()
        assert self.memory() == self._captured, "the work moved a tensor"
        if self._result is None:
            self._result = torch.empty_like(result)
        return self._result.copy_(result)


def recipe(**values: Any) -> Recipe:
    small = {
        "model": {"name": SMALL_NETWORK},
        "data": {"train_crop_size": SIZE},
        "global_batch": 8,
        "micro_batch": 4,
        "label_smoothing": 0.1,
    }
    settings = Recipe.model_validate(small | {"precision": "fp32", "device": "cpu"} | values)
    trusted_code.trust(settings)
    return settings


def train(settings: Recipe, monkeypatch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train `STEPS` steps with learning rates that float32 represents. Returns the metrics of each, and the weights."""
    network = factory.build(settings, 10, CPU, torch.float32)
    network.train()
    world = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)
    plan = batch_plan.plan(settings, 1)
    state = build.build_state(settings, network, plan, world, Precision(settings.precision, CPU), 10)
    runner = StepRunner(GradientComputer(settings, plan, 0, CPU, state))

    def memory() -> list[int]:
        optimizer = [t for values in state.optimizer.state.values() for t in values.values() if t is not None]
        lrs = [group["lr"] for group in state.optimizer.param_groups]
        tensors = [*network.parameters(), *network.buffers(), *optimizer, *lrs]
        return [t.data_ptr() for t in [*tensors, *(p.grad for p in network.parameters())]]

    Replayed.memory, Replayed.replays = staticmethod(memory), 0
    monkeypatch.setattr(cuda_graph, "CudaGraph", Replayed)
    feed = Feed(_batches(plan.forward_batch), CPU)
    metrics = []
    for step in range(STEPS):
        computed, norm = runner.run(feed, step, 2.0 ** -(step + 3), StepHooks(launched=feed.prefetch))
        metrics.append(torch.cat([computed.sums.reshape(-1), norm.double().view(1)]))
    # The forward passes and the updates, but for the first three of each.
    assert Replayed.replays == (plan.accumulation * STEPS - 3 + STEPS - 3 if settings.cuda_graphs is True else 0)
    with state.consensus(world, STEPS):
        return metrics, {name: tensor.clone() for name, tensor in network.state_dict().items()}


def _batches(samples: int):
    dice = torch.Generator().manual_seed(1)
    while True:
        pixels = torch.randint(0, 256, (samples, SIZE, SIZE, 3), dtype=torch.uint8, generator=dice)
        yield Batch(pixels, torch.randint(0, 10, (samples,), generator=dice), np.arange(samples))


CASES = {
    "sgd": {},
    "one forward pass": {"micro_batch": 8},
    "clipped": {"optimizer": {"clip_norm": 0.5}},
    "clipped adaptively": {"optimizer": {"clip_agc": 0.01}},
    "ghost": {"micro_batch": 2, "forward_batch": 4},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "dropout": {"model": {"name": "mobilenet_v3_small"}},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_as_graphs_have_the_bits_of_plain_steps(case, monkeypatch):
    plain, weights = train(recipe(**CASES[case]), monkeypatch)
    metrics, graphed = train(recipe(**CASES[case], cuda_graphs=True), monkeypatch)
    for own, expected in zip(metrics, plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)  # of fp16, the first gradients overflow
    assert all(torch.equal(graphed[name], weights[name]) for name in weights)
    assert not torch.equal(metrics[-1], metrics[-2])


class Added(TorchDispatchMode):
    """Counts the additions into memory that is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.add_.Tensor, torch.ops.aten._foreach_add_.List)
        return function(*args, **(kwargs or {}))


def test_a_gradient_is_added_to_that_of_all_parameters_at_once():
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))
    parameters, unused = [*layers.parameters()], torch.nn.Parameter(torch.ones(2))
    images = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

    def loss() -> torch.Tensor:
        return torch.nn.Sequential(*layers)(images).square().sum()

    backward, add = Added(), Added()
    for _ in range(2):
        with backward:
            loss().backward()
    expected = [p.grad for p in parameters]
    torch.nn.Module.zero_grad(layers)
    for _ in range(2):
        with add:
            cuda_graph.add_gradient(loss(), [*parameters, unused])
    assert all(torch.equal(p.grad, one) for p, one in zip(parameters, expected, strict=True)) and unused.grad is None
    assert (backward.count, add.count) == (len(parameters), 2)


@pytest.mark.parametrize(
    ("device", "strategy", "message"),
    [
        ("cpu", "single", "--cuda-graphs is for GPUs, and this run computes on a CPU"),
        ("cuda", "ddp", "the messages of strategy ddp cannot be captured .* --model.compile works"),
    ],
)
def test_graphs_are_refused_where_they_do_not_work(device, strategy, message):
    for asked in (False, "auto"):
        cuda_graph.check(recipe(cuda_graphs=asked), torch.device(device), parallel.load(strategy))
    cuda_graph.check(recipe(cuda_graphs=True), torch.device("cuda"), parallel.load("single"))
    with pytest.raises(UserError, match=message):
        cuda_graph.check(recipe(cuda_graphs=True), torch.device(device), parallel.load(strategy))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"precision": "bf16"}, True),
        ({"precision": "fp16"}, True),
        ({"precision": "bf16", "cuda_graphs": False}, False),
        ({"precision": "bf16", "deterministic": True}, False),
        ({"precision": "fp64"}, False),
        ({"precision": "bf16", "optimizer": {"name": "lamb"}}, False),
        ({"precision": "bf16", "optimizer": {"sam_rho": 0.1}}, False),
        ({"precision": "bf16", "data": {"train_crop_sizes": (160, 224), "train_crop_epochs": (0, 1)}}, False),
    ],
)
def test_auto_captures_the_steps_of_one_gpu_with_a_compiled_network(settings, expected):
    asked = recipe(**settings)
    for kind, compiled in (("cuda", True), ("cuda", False), ("cpu", True)):
        world = World(RankInfo("none", 0, 1, 0, 1), torch.device(kind), None, 1)
        found = cuda_graph.wanted(asked, world, Precision(asked.precision, CPU), compiled)
        assert found is (expected and kind == "cuda" and compiled)


@pytest.mark.parametrize(("name", "expected"), [("worldsize:cifarnet", True), ("resnet18", False), ("timm:resnet18", False)])
def test_auto_captures_networks_of_worldsize_without_a_compiler(name, expected):
    """Others may do something in Python in each step, which a graph would not repeat."""
    world = World(RankInfo("none", 0, 1, 0, 1), torch.device("cuda"), None, 1)
    asked = recipe(precision="bf16", model={"name": name})
    assert cuda_graph.wanted(asked, world, Precision("bf16", CPU), compiled=False) is expected


def test_several_processes_are_not_captured():
    world = World(RankInfo("none", 0, 2, 0, 2), torch.device("cuda"), None, 1)
    assert not cuda_graph.wanted(recipe(), world, Precision("bf16", CPU), compiled=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "auto"),
        (["--cuda-graphs"], True),
        (["--cuda-graphs", "--epochs", "2"], True),
        (["--no-cuda-graphs"], False),
        (["--cuda-graphs", "auto"], "auto"),
    ],
)
def test_the_flag_needs_no_value(arguments, expected):
    parsed = command_line.parse(command_line.Train, arguments, command_line.Train(Recipe()), "train digits")
    assert parsed.settings.cuda_graphs is expected


@pytest.mark.parametrize(
    ("waits", "free", "message"),
    [
        (True, 99, "makes the host wait for the GPU (network.py:7)"),
        (False, 1, "too little memory for their own copy"),
        (False, 99, None),
    ],
)
def test_a_cautious_graph_captures_nothing_that_waits_or_does_not_fit(waits, free, message, monkeypatch, caplog):
    """What torch says about a GPU comes from here."""
    mode = []
    monkeypatch.setattr(cuda_graph, "CudaGraph", Replayed)
    monkeypatch.setattr(Replayed, "memory", staticmethod(list), raising=False)
    monkeypatch.setattr(Replayed, "replays", 0)
    for name, value in (("memory_allocated", 1), ("memory_reserved", 1), ("max_memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 100))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())

    def work(x: torch.Tensor) -> torch.Tensor:
        if waits and mode[-1:] == ["warn"]:
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, "network.py", 7)
        return 2 * x

    graphed = cuda_graph.Graphed(work, CPU, cautious=True)
    graphed._side = FakeStream()
    results = [graphed(torch.full((), float(i))).item() for i in range(6)]
    assert results == [0, 2, 4, 6, 8, 10] and mode == ["warn", 0]
    assert Replayed.replays == (0 if message else 3)
    assert (message in caplog.text) if message else not caplog.records


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


def test_the_command_refuses_graphs_on_a_cpu(fails):
    assert "--cuda-graphs is for GPUs" in fails("train", "digits", "--cuda-graphs", "--device", "cpu")


def unfrozen(settings: Recipe, monkeypatch) -> dict[str, torch.Tensor]:
    """The weights after five steps with frozen parts and five without."""
    monkeypatch.setattr(cuda_graph, "CudaGraph", Replayed)
    monkeypatch.setattr(Replayed, "memory", staticmethod(list), raising=False)
    monkeypatch.setattr(Replayed, "replays", 0)
    network = factory.build(settings, 10, CPU, torch.float32).train()
    world, plan = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1), batch_plan.plan(settings, 1)
    state = build.build_state(settings, network, plan, world, Precision(settings.precision, CPU), 10)
    compute, feed = GradientComputer(settings, plan, 0, CPU, state), Feed(_batches(plan.forward_batch), CPU)
    for phase in range(2):
        if phase:
            unfreezing.unfreeze(compute)
        runner = StepRunner(compute)
        for step in range(5 * phase, 5 * phase + 5):
            runner.run(feed, step, 2.0**-6, StepHooks(launched=feed.prefetch))
    # In each phase all but the first three forward passes and updates.
    assert Replayed.replays == (2 * (plan.accumulation * 5 - 3 + 5 - 3) if settings.cuda_graphs is True else 0)
    with state.consensus(world, 10):
        return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def test_a_network_is_captured_again_after_its_parts_unfreeze(monkeypatch):
    model = {"name": SMALL_NETWORK, "freeze": ("conv1", "layer1"), "unfreeze_epoch": 1}
    plain, graphed = (unfrozen(recipe(model=model, cuda_graphs=graphs), monkeypatch) for graphs in (False, True))
    assert all(torch.equal(graphed[name], plain[name]) for name in plain)
