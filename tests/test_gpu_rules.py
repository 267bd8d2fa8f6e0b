"""What matters on GPUs only, tested where a CPU can compute it: see test_fake_gpu.py for devices and waits."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from worldsize import cli, continuity, device_errors, environment, memory, model, optim, precision, world
from worldsize.batch import BatchPlan, evaluation_batch
from worldsize.compute import Compute
from worldsize.data.rng import Use, seed_of
from worldsize.errors import Unmet, UserError
from worldsize.parallel import hooks
from worldsize.parallel.base import Exchange
from worldsize.parallel.replicas import Replicas
from worldsize.place import Place
from worldsize.recipe import Optimizer, Parallel, Recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2))


# The optimizer


@pytest.mark.parametrize("overflows", [False, True])
def test_a_first_step_that_overflows_leaves_a_momentum_of_zero(overflows):
    """torch's fused SGD skips such a step itself, after it has allocated the momentum without initializing it."""
    layer = nn.Linear(64, 64)
    optimizer = optim.build(layer, Optimizer(momentum=0.9), GPU)
    layer.weight.grad, layer.bias.grad = torch.ones(64, 64), torch.ones(64)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(overflows))
    optimizer.step()
    momenta = {float(value) for state in optimizer.state.values() for value in state["momentum_buffer"].unique()}
    assert all(value == 0 for value in momenta) if overflows else max(momenta) > 0.4


# Strategies


def test_powersgd_restores_its_state_to_the_device_of_the_model():
    layer = nn.Linear(8, 8, device="meta")
    hook = hooks.PowerSGD(layer, Parallel(compression="powersgd"), 2, Exchange(CPU))
    hook.load_state({"powersgd.step": torch.tensor(3), "powersgd.q.weight": torch.zeros(8, 2)})
    assert {t.device.type for name, t in hook.state().items() if name != "powersgd.step"} == {"meta"}


class TwoReplicas(Replicas):
    """`Replicas` on two devices that are both the CPU; as in torch, the first replica shares the model's buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device_ids, self.src_device_obj, self.output_device = [0, 1], CPU, CPU

    def scatter(self, inputs, kwargs, device_ids):
        return [(part,) for part in inputs[0].chunk(2)], [kwargs, kwargs]

    def replicate(self, module, device_ids):
        return [_replica(module, own_buffers=index > 0) for index in range(2)]

    def gather(self, outputs, output_device):
        return torch.cat(outputs)


def _replica(module: nn.Module, own_buffers: bool) -> nn.Module:
    copy = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        setattr(copy, name, None if parameter is None else parameter.view_as(parameter))
    copy._buffers = {n: b.clone() if own_buffers and b is not None else b for n, b in module._buffers.items()}
    copy._modules = {name: _replica(child, own_buffers) for name, child in module._modules.items()}
    return copy


def test_dataparallel_trains_batchnorm_and_keeps_the_mean_of_all_statistics():
    whole, parts = TwoReplicas(network()), network()
    for layer in [*model.norms(whole), *model.norms(parts)]:
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


def test_dataparallel_computes_in_the_chosen_format():
    """torch's own threads enter autocast with its default format."""
    seen = []
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.float16):  # the default of a CPU is bf16
        TwoReplicas(layer)(torch.randn(4, 4))
    assert seen == [torch.float16] * 2


@pytest.mark.parametrize("devices", [1, 4])
def test_each_device_draws_what_a_process_of_its_own_would(monkeypatch, devices):
    generators = tuple(torch.Generator() for _ in range(devices))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    recipe = Recipe(seed=7)
    plan = BatchPlan(16 * devices, 4, 1, devices)
    compute = Compute(recipe, plan, 0, GPU, None, None, None)
    compute._seed(step=3, forward=2)
    for device, generator in enumerate(generators):
        assert generator.initial_seed() == seed_of(7, Use.TORCH, 3, 2 * devices + device)


def test_seeding_draws_what_torch_manual_seed_does():
    compute = Compute(Recipe(seed=7), BatchPlan(4, 4, 1), 0, CPU, None, None, None)
    compute._seed(step=3, forward=2)
    drawn = torch.rand(4)
    torch.manual_seed(seed_of(7, Use.TORCH, 3, 2))
    assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize(("strategy", "device"), [("ddp", GPU), ("async", None)])
def test_asynchronous_ranks_do_not_bind_their_groups_to_a_gpu(monkeypatch, strategy, device):
    """In a bound group, each new group of two ranks makes all ranks call ncclCommSplit, and the two never do."""
    asked = {}
    monkeypatch.setattr(world, "_device", lambda place, choice: GPU)
    monkeypatch.setattr(world, "_assert_size", lambda world: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: asked.update(settings, backend=backend))
    monkeypatch.setattr(dist, "new_group", lambda **settings: None)
    recipe = Recipe.model_validate({"parallel": {"strategy": strategy}})
    place = Place("torchrun", 0, 3, 0, 3, ("127.0.0.1", 1))
    joined = world.join(place, recipe, 1, hosts_only=strategy == "async")
    assert asked["device_id"] == device
    assert ("nccl" in asked["backend"]) == (joined.backend == "nccl") == (strategy == "ddp")


# Number formats


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16"])
def test_fp32_is_fp32(name):
    before = torch.backends.cudnn.allow_tf32
    try:
        precision.Precision(name, GPU).apply()
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == (name == "tf32")
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--precision", "fp16"), "--precision fp16 is for GPUs, and torch finds none here: use bf16 or fp32, or add"),
        (("--precision", "tf32"), "--precision tf32 is a format of GPUs, and this run computes on a CPU"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_formats_of_gpus_are_refused_on_a_cpu(tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "digits", *arguments]) == 64
    assert message in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("name", "capability", "refused"), [("bf16", 7, True), ("tf32", 7, True), ("bf16", 8, False)])
def test_a_gpu_without_the_units_is_refused(monkeypatch, name, capability, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    if refused:
        with pytest.raises(UserError, match=f"--precision {name}: Tesla T4 has no units for it .* use fp16 or fp32"):
            precision.resolve(Recipe(precision=name), GPU)
    else:
        assert precision.resolve(Recipe(precision=name), GPU).name == name


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
    monkeypatch.setattr(environment, "hardware", lambda world: here)
    facts = {"data": {}, "precision": "bf16"}
    other = Gathered(lambda own, hardware: (own, hardware | {"device": "A100"}))
    with caplog.at_level(logging.WARNING):
        continuity.check_ranks(other, facts, same_bits=False)
    assert "ranks 0 and 1 run on different hardware: device: H100 and A100. The slowest sets the pace" in caplog.text
    with pytest.raises(UserError, match="device: H100 and A100"):
        continuity.check_ranks(other, facts, same_bits=True)
    with pytest.raises(UserError, match="precision of ranks 0 and 1 differ: bf16 and fp32"):
        continuity.check_ranks(
            Gathered(lambda own, hardware: (own | {"precision": "fp32"}, hardware)), facts, same_bits=False
        )


def test_the_driver_is_read_from_proc(tmp_path: Path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\nGCC version: 12\n")
    assert environment._driver(file) == "550.54.15"
    assert environment._driver(tmp_path / "none") is None


# Errors


class Small(nn.Module):
    """A network on a device whose memory holds ``most`` images."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.weight = most, nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        return x.mean((2, 3)) @ self.weight


@pytest.mark.parametrize(
    ("most", "plan", "advice"),
    [
        (100, BatchPlan(256, 256, 1), "a forward pass of 256 images is too large, one of 64 fits: add --micro"),
        (
            100,
            BatchPlan(256, 32, 1, groups=8),
            "a forward pass of 256 images is too large, one of 64 fits: add --forw",
        ),
        (
            20,
            BatchPlan(256, 32, 1, groups=8),
            "not even a forward pass of 32 images fits: lower --micro-batch to less",
        ),
        (0, BatchPlan(256, 256, 1), "not even a forward pass of 1 images fits: lower --data.train-crop-size"),
    ],
)
def test_the_message_of_a_full_gpu_names_a_batch_that_fits(most, plan, advice):
    small = Small(most)
    normalise = lambda pixels: pixels.permute(0, 3, 1, 2).float()  # noqa: E731
    state = SimpleNamespace(model=small)
    recipe = Recipe.model_validate({"data": {"train_crop_size": 8}})
    compute = Compute(recipe, plan, 0, CPU, state, precision.Precision("fp32", CPU), normalise)
    with pytest.raises(torch.OutOfMemoryError) as failed:
        small(torch.zeros(256, 3, 8, 8))
    explained = device_errors.explain(failed.value, 0, lambda: memory.remedy(compute))
    assert isinstance(explained, UserError)
    assert str(explained).startswith(f"out of GPU memory: {advice}") and "Tried to allocate" not in str(explained)
    assert small.weight.grad is None


@given(failed=st.integers(2, 5000), limit=st.integers(0, 5000), multiple=st.integers(1, 64))
def test_halving_ends_at_a_batch_that_fits(failed, limit, multiple):
    tried = []
    found = memory.largest_batch(lambda n: tried.append(n) or n <= limit, failed, multiple)
    assert all(n % multiple == 0 and 0 < n < failed for n in tried) and len(tried) < 14
    assert found is None or (found == tried[-1] <= limit)
    if failed // 2 >= multiple and limit >= failed // 2:
        assert found is not None


# From reports: NVIDIA/nccl #2076 and #1514, pytorch/torchtitan #1224.
REMOTE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a \
network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgressOpt: Call to recv from 172.16.0.7<33759> failed : Connection reset by peer"""
CLOSED = """NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3
ncclInternalError: Internal check failed.
Last error:
Net : Connection closed by remote peer node2<50260>"""
DUPLICATE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=\
WARN for details), NCCL version 2.26.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 6000"""


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (REMOTE, ("rank 3: NCCL failed with 172.16.0.7: ", "Connection reset by peer", "look at its own log first")),
        (CLOSED, ("rank 3: NCCL failed with node2: ", "look at its own log first")),
        (DUPLICATE, ("NCCL failed with rank 0 and rank 1: ", "two processes use the same GPU")),
        ("unhandled system error (run with NCCL_DEBUG=INFO)", ("NCCL_SOCKET_IFNAME",)),
        ("something new", ("NCCL_DEBUG=INFO",)),
    ],
)
def test_errors_of_nccl_name_the_peer_and_the_likely_cause(message, parts):
    explained = device_errors.explain(dist.DistBackendError(message), 3, str)
    assert isinstance(explained, Unmet) and explained.exit_code == 69
    assert all(part in str(explained) for part in parts), str(explained)


def test_an_operation_without_a_deterministic_implementation_is_a_user_error():
    torch_message = (
        "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'."
    )
    explained = device_errors.explain(RuntimeError(torch_message), 0, str)
    assert isinstance(explained, UserError) and "leave out --deterministic" in str(explained)
    assert device_errors.explain(RuntimeError("something else"), 0, str) is None


def test_evaluation_uses_large_batches_on_a_gpu_at_every_world_size():
    assert [evaluation_batch(n, "cpu") for n in (8, 300)] == [8, 300]
    assert [evaluation_batch(n, "cuda") for n in (8, 96, 300)] == [256, 192, 300]
