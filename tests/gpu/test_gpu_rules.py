"""What matters on GPUs only, tested where a CPU can compute it: see test_fake_gpu.py for devices and waits."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from processes import distance
from steps_of_ranks import weights_after
from worldsize.config.recipe import Data, Optimizer, Parallel, Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.data.sampling.random_numbers import Use, seed_of
from worldsize.distributed import joining, world
from worldsize.distributed.batch_plan import BatchPlan, evaluation_batch
from worldsize.distributed.rank import RankInfo
from worldsize.errors import UserError
from worldsize.models import factory, freezing
from worldsize.models.freezing import FrozenBatchNorm2d
from worldsize.optim import optimizers
from worldsize.parallel.base import Exchange
from worldsize.parallel.dataparallel.replicas import Replicas
from worldsize.parallel.ddp import compression, strategy
from worldsize.training import build, environment, precision, resume
from worldsize.training.gradients import GradientComputer
from worldsize.training.objective import Objective

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ONE = world.World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2))


# The optimizer


@pytest.mark.parametrize("overflows", [False, True])
def test_a_first_step_that_overflows_leaves_a_momentum_of_zero(overflows):
    """torch's fused SGD skips such a step itself, after it has allocated the momentum without initializing it."""
    layer = nn.Linear(64, 64)
    optimizer = optimizers.build(layer, Optimizer(momentum=0.9), GPU)
    layer.weight.grad, layer.bias.grad = torch.ones(64, 64), torch.ones(64)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(overflows))
    optimizer.step()
    momenta = {float(value) for state in optimizer.state.values() for value in state["momentum_buffer"].unique()}
    assert all(value == 0 for value in momenta) if overflows else max(momenta) > 0.4


def test_the_steps_before_a_capture_do_not_warn(monkeypatch):
    """torch warns of a capturable optimizer whose step is not captured; other warnings stay."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stream = SimpleNamespace(is_capturing=lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)  # what torch 2.15 asks
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer = optimizers.build(nn.Linear(2, 2), Optimizer(name="adamw"), CPU, captured=True)
        optimizer._accelerator_graph_capture_health_check()
        warnings.warn("another", stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["another"]
    assert optimizer._warned_capturable_if_run_uncaptured


# Memory layout


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_network_computes_in_the_layout_of_the_recipe(channels_last):
    """One tensor in NHWC, images or weights, is enough for cuDNN to compute in it."""
    recipe = Recipe.model_validate({"model": {"name": "resnet18", "channels_last": channels_last}, "global_batch": 32})
    model = factory.build(recipe, 10, CPU, torch.float32)
    state = build.build_state(recipe, model, BatchPlan(32, 32, 1), ONE, precision.Precision("fp32", CPU), 10)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    seen = []
    for layer in (layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)):
        layer.register_forward_hook(lambda _, inputs, output: seen.extend([*inputs, output]))
    state.objective(torch.zeros(4, 64, 64, 3, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    assert len(seen) == 2 * 17 and all(tensor.is_contiguous(memory_format=layout) for tensor in seen)


# Strategies


def test_powersgd_restores_its_state_to_the_device_of_the_model():
    layer = nn.Linear(8, 8, device="meta")
    hook = compression.PowerSGD(layer, Parallel(compression="powersgd"), 2, Exchange(CPU))
    hook.load_state({"powersgd.step": torch.tensor(3), "powersgd.q.weight": torch.zeros(8, 2)})
    assert {t.device.type for name, t in hook.state().items() if name != "powersgd.step"} == {"meta"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ddp_has_the_numbers_of_one_process(tmp_path, ranks):
    """As test_gpu.py tests on a GPU; here so that the test itself works there the first time."""
    expected = weights_after(1, "cpu", None, tmp_path / "expected")
    assert distance(weights_after(ranks, "cpu", "gloo", tmp_path / "ranks"), expected) < 1e-9


def test_syncbatchnorm_leaves_frozen_layers_as_they_are():
    whole = nn.Sequential(network(), network())
    freezing.freeze(whole, ("0",))
    strategy.synchronize_norms(whole)
    kinds = [[type(layer) for layer in part if "Norm" in type(layer).__name__] for part in whole]
    assert kinds == [[FrozenBatchNorm2d] * 2, [nn.SyncBatchNorm] * 2]


class TwoReplicas(Replicas):
    """`Replicas` on two devices that are both the CPU; as in torch, the first replica shares the model's buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device_ids, self.src_device_obj, self.output_device = [0, 1], CPU, CPU

    def scatter(self, inputs, kwargs, device_ids):
        return list(zip(*(part.chunk(2) for part in inputs), strict=True)), [kwargs, kwargs]

    def replicate(self, module, device_ids):
        return [_replica(module, own_buffers=index > 0) for index in range(2)]

    def gather(self, outputs, output_device):
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs)
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def _replica(module: nn.Module, own_buffers: bool) -> nn.Module:
    copy = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        setattr(copy, name, None if parameter is None else parameter.view_as(parameter))
    copy._buffers = {n: b.clone() if own_buffers and b is not None else b for n, b in module._buffers.items()}
    copy._modules = {name: _replica(child, own_buffers) for name, child in module._modules.items()}
    return copy


def test_dataparallel_trains_batchnorm_and_keeps_the_mean_of_all_statistics():
    whole, parts = TwoReplicas(network()), network()
    for layer in [*factory.norms(whole), *factory.norms(parts)]:
        layer.momentum = 1.0
    x = torch.randn(6, 3, 8, 8)
    expected, losses = {}, []
    for part in x.chunk(2):
        losses.append(parts(part).square().sum())
        for name, buffer in parts.named_buffers():
            expected[name] = expected.get(name, 0) + buffer.detach().clone() / 2
    sum(losses).backward()
    whole(x).square().sum().backward()  # fails if the statistics are averaged before it
    whole.average_statistics()
    for (name, own), other in zip(whole.module.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, msg=name)
    for name, buffer in whole.module.named_buffers():
        if "running" in name:
            torch.testing.assert_close(buffer, expected[name], msg=name)


def test_dataparallel_keeps_the_statistics_of_the_replicas_that_used_a_layer():
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x):
            return self.other(x) if x.mean() > 0.5 else self.norm(x)

    whole = TwoReplicas(Leaving())
    statistics = factory.RunningStatistics(whole.module, own=True)
    statistics.clear()
    low, high = torch.rand(2, 3, 4, 4) / 2, torch.rand(2, 3, 4, 4) / 2 + 0.5
    whole(torch.cat([low, high])).sum().backward()
    whole.average_statistics()
    statistics.collect(0)
    statistics.advance(*statistics.take())
    found = statistics.tensors()
    torch.testing.assert_close(found["0.mean"], 0.1 * low.mean((0, 2, 3)))
    torch.testing.assert_close(found["1.var"], 0.9 + 0.1 * high.var((0, 2, 3)))


def test_dataparallel_computes_in_the_chosen_format():
    """torch's own threads enter autocast with its default format."""
    seen = []
    layer = nn.Conv2d(3, 4, 4)
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    fp16 = precision.Precision("fp16", CPU)  # the default of a CPU is bf16
    objective = Objective(
        nn.Sequential(layer, nn.Flatten()), Normalise(Data(), CPU, torch.float32), fp16, Recipe(label_smoothing=0.1)
    )
    losses, logits = TwoReplicas(objective)(torch.zeros(4, 4, 4, 3, dtype=torch.uint8), torch.tensor([0, 1, 2, 3]))
    assert seen == [torch.float16] * 2
    assert losses.shape == (4,) and logits.shape == (4, 4)


@pytest.mark.parametrize("devices", [1, 4])
def test_each_device_draws_what_a_process_of_its_own_would(monkeypatch, devices):
    generators = tuple(torch.Generator() for _ in range(devices))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    recipe = Recipe(seed=7)
    plan = BatchPlan(16 * devices, 4, 1, devices)
    compute = GradientComputer(recipe, plan, 0, GPU, None)
    compute._seed(step=3, forward=2)
    for device, generator in enumerate(generators):
        assert generator.initial_seed() == seed_of(7, Use.TORCH, 3, 2 * devices + device)


def test_seeding_draws_what_torch_manual_seed_does():
    compute = GradientComputer(Recipe(seed=7), BatchPlan(4, 4, 1), 0, CPU, None)
    compute._seed(step=3, forward=2)
    drawn = torch.rand(4)
    torch.manual_seed(seed_of(7, Use.TORCH, 3, 2))
    assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize(("strategy", "device"), [("ddp", GPU), ("async", None)])
def test_asynchronous_ranks_do_not_bind_their_groups_to_a_gpu(monkeypatch, strategy, device):
    """In a bound group, each new group of two ranks makes all ranks call ncclCommSplit, and the two never do."""
    asked = {}
    monkeypatch.setattr(world, "_device", lambda rank_info, choice: GPU)
    monkeypatch.setattr(world, "_assert_size", lambda world: None)
    monkeypatch.setattr(joining, "_store", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: asked.update(settings, backend=backend))
    monkeypatch.setattr(dist, "new_group", lambda **settings: None)
    recipe = Recipe.model_validate({"parallel": {"strategy": strategy}})
    rank_info = RankInfo("torchrun", 0, 3, 0, 3, ("127.0.0.1", 1))
    joined = world.join(rank_info, recipe, 1, hosts_only=strategy == "async")
    assert asked["device_id"] == device
    assert ("nccl" in asked["backend"]) == (joined.backend == "nccl") == (strategy == "ddp")


# Determinism


def test_determinism_does_not_fill_new_memory(monkeypatch):
    """Which would overwrite each pinned batch once, on the thread that launches kernels."""
    for owner, name in ((torch.backends.cudnn, "deterministic"), (torch.backends.cudnn, "benchmark")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        build._set_determinism(True)
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


# Ranks on different machines


class Gathered:
    """A world in which the other rank gathers ``other``."""

    is_main = True

    def __init__(self, other) -> None:
        self._other = other
        self.device, self.threads = CPU, 1

    def gather(self, value):
        return [value, self._other(*value)]


def test_ranks_on_different_hardware_are_reported(caplog, monkeypatch):
    here = {"device": "H100", "driver": "550.54.15", "nccl": "2.27.5"}
    monkeypatch.setattr(environment, "hardware", lambda kind, threads: here)
    facts = {"data": {}, "precision": "bf16"}
    other = Gathered(lambda own, hardware: (own, hardware | {"device": "A100"}))
    with caplog.at_level(logging.WARNING):
        resume.check_ranks(other, facts, same_bits=False)
    assert "ranks 0 and 1 run on different hardware: device: H100 and A100. The slowest sets the pace" in caplog.text
    with pytest.raises(UserError, match="device: H100 and A100"):
        resume.check_ranks(other, facts, same_bits=True)
    with pytest.raises(UserError, match="precision of ranks 0 and 1 differ: bf16 and fp32"):
        resume.check_ranks(Gathered(lambda own, hardware: (own | {"precision": "fp32"}, hardware)), facts, same_bits=False)


def test_the_driver_is_read_from_proc(tmp_path: Path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\nGCC version: 12\n")
    assert environment._driver(file) == "550.54.15"
    assert environment._driver(tmp_path / "none") is None


SHOWN, NONE = {"CUDA_VISIBLE_DEVICES": "3"}, {}


@pytest.mark.parametrize(
    ("launcher", "count", "local_rank", "env", "index"),
    [
        ("torchrun", 4, 3, NONE, 3),
        ("torchrun", 1, 1, SHOWN, 0),  # a script shows each process one GPU
        ("horovodrun", 1, 1, SHOWN, 0),
        ("Open MPI", 1, 1, NONE, 0),
        ("Slurm", 1, 1, NONE, 0),
        ("Slurm", 2, 3, {"SLURM_GPUS_PER_TASK": "2"}, 0),
        ("torchrun", 1, 1, NONE, None),
        ("worldsize --procs", 1, 1, SHOWN, None),
        ("Slurm", 2, 3, NONE, None),
    ],
)
def test_each_process_takes_its_gpu(monkeypatch, launcher, count, local_rank, env, index):
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    used = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    rank_info = RankInfo(launcher, local_rank, 4, local_rank, 4, ("127.0.0.1", 1))
    if index is None:
        with pytest.raises(UserError, match=f"4 processes run on this machine, but it has {count} GPU"):
            world._device(rank_info, "auto")
    else:
        assert world._device(rank_info, "auto") == torch.device("cuda", index) == used[0]


# Evaluation


def sizes(micro_batch: int, forward_batch: int | None = None) -> Recipe:
    values = {"global_batch": micro_batch * 64, "micro_batch": micro_batch, "forward_batch": forward_batch}
    return Recipe.model_validate(values)


def test_evaluation_uses_large_batches_on_a_gpu_at_every_world_size():
    assert [evaluation_batch(sizes(n), "cpu") for n in (8, 300)] == [8, 300]
    assert [evaluation_batch(sizes(n), "cuda") for n in (8, 96, 300)] == [256, 192, 300]


def test_evaluation_tries_no_more_than_the_forward_batch_asked_for():
    """Somebody who lowers it does so because the memory is full."""
    assert [evaluation_batch(sizes(8, n), "cuda") for n in (8, 64, 512)] == [8, 64, 256]
    assert evaluation_batch(sizes(8, 64), "cpu") == 8
