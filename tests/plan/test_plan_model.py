"""The cost model, networks, their traffic, and the fit."""

from __future__ import annotations

import ast
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from planned import CPU, EIGHTHS, GPU, sent
from worldsize.config.recipe import Recipe
from worldsize.models import networks
from worldsize.parallel.base import Exchange
from worldsize.parallel.ddp import compression
from worldsize.plan import model, network, traffic
from worldsize.plan.fit import NAMES, Measurement, Prior, fit
from worldsize.plan.model import Cluster, Hardware, Message, Traffic

parameters = st.builds(
    Hardware,
    *(st.floats(1e-5, 1e-1), st.floats(1e-5, 1e-2), st.floats(1e-6, 0.5), st.floats(1e-5, 0.3)),
    *(st.floats(1e-7, 1e-3), st.floats(1e7, 1e12), st.floats(1e-7, 1e-3), st.floats(1e7, 1e12)),
)
clusters = st.builds(Cluster, st.integers(1, 600), st.integers(1, 16))
batches = st.integers(1, 512)


def total(hardware, messages, cluster, batch, **more):
    return model.step(hardware, messages, cluster, batch, **more).total_s


# The model ----------------------------------------------------------------------------------------------------------------


@given(parameters, sent, clusters, batches)
def test_efficiency_is_at_most_one(hardware, messages, cluster, batch):
    assert total(hardware, messages, Cluster(1, 1), batch) <= total(hardware, messages, cluster, batch)


@given(parameters, sent, clusters, batches, st.floats(1, 100), st.sampled_from(["link_bytes_per_s", "local_bytes_per_s"]))
def test_more_bandwidth_is_never_slower(hardware, messages, cluster, batch, factor, link):
    faster = replace(hardware, **{link: factor * getattr(hardware, link)})
    assert total(faster, messages, cluster, batch) <= total(hardware, messages, cluster, batch)


@given(parameters, sent, clusters, batches, st.floats(0.01, 1))
def test_fewer_bytes_are_never_slower(hardware, messages, cluster, batch, share):
    fewer = replace(messages, messages=tuple(Message(m.ready, share * m.size) for m in messages.messages))
    assert total(hardware, fewer, cluster, batch) <= total(hardware, messages, cluster, batch)


@given(parameters, sent, clusters, batches, st.floats(1, 10), st.sampled_from(["jitter", "contention", "link_latency_s"]))
def test_stragglers_contention_and_latency_are_never_faster(hardware, messages, cluster, batch, factor, name):
    worse = replace(hardware, **{name: factor * getattr(hardware, name)})
    assert total(hardware, messages, cluster, batch) <= total(worse, messages, cluster, batch)


@given(parameters, sent, clusters, batches, st.floats(1, 1e6))
def test_a_step_is_no_faster_than_its_loader(hardware, messages, cluster, batch, supply):
    assert total(hardware, messages, cluster, batch, supply=supply) >= 0.999999 * batch / supply


def test_one_device_computes_and_nothing_else():
    step = model.step(GPU, EIGHTHS, Cluster(1, 1), 256, passes=2)
    assert step.total_s == pytest.approx(2 * 4e-3 + 256 * 0.4e-3)
    assert (step.exposed_s, step.straggler_s, step.contention_s, step.data_s) == (0, 0, 0, 0)


def test_the_expected_maximum_is_that_of_normal_variables():
    generator = torch.Generator().manual_seed(0)
    for count in (2, 8, 64, 512):
        drawn = torch.randn(20_000, count, generator=generator).max(dim=1).values.mean().item()
        assert model.expected_maximum(count) == pytest.approx(drawn, abs=0.04)
    assert model.expected_maximum(1) == pytest.approx(0)


def test_only_what_the_backward_pass_does_not_hide_is_exposed():
    """Two messages by hand: the first is hidden completely, the second starts with the end of the backward pass."""
    hardware = replace(GPU, link_latency_s=1e-9, link_bytes_per_s=1e9)
    step = model.step(hardware, Traffic((Message(0.5, 10e6), Message(1.0, 10e6))), Cluster(2, 1), 100)
    assert step.compute_s == pytest.approx(44e-3)
    assert step.exposed_s == pytest.approx(10e-3, rel=1e-3)  # 2 (N - 1) / N of 10 MB at 1 GB/s
    assert step.busy_s == pytest.approx(20e-3, rel=1e-3)
    slow = model.step(hardware, Traffic((Message(0.5, 10e6), Message(1.0, 10e6)), every=4), Cluster(2, 1), 100)
    assert slow.exposed_s == pytest.approx(step.exposed_s / 4)
    assert slow.straggler_s == pytest.approx(step.straggler_s / 2)


def test_the_model_is_pure():
    """Nothing in it can read a clock, a file or a device."""
    pure = {"__future__", "collections", "dataclasses", "math", "numpy", "statistics"}
    for module in (model, traffic, sys.modules[fit.__module__]):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.ImportFrom):
                own = {f"worldsize.{name}" for name in ("errors", "config.recipe", "plan", "plan.model")}
                assert node.module.split(".")[0] in pure or node.module in own
            elif isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= pure


# Networks and traffic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "billions"),
    # torchvision's own counts of multiply-adds (GFLOPS in the documentation of its weights).
    [
        *[("resnet50", 224, 4.09), ("vgg16", 224, 15.47), ("inception_v3", 299, 5.71), ("convnext_tiny", 224, 4.46)],
        *[("mobilenet_v3_small", 224, 0.06)],
    ],
)
def test_multiply_adds_are_those_that_torchvision_states(name, size, billions):
    recipe = Recipe.model_validate({"model": {"name": name}, "data": {"train_crop_size": size}})
    found = network.profile(recipe, 1000)
    assert found.multiply_adds / 1e9 == pytest.approx(billions, abs=0.02)
    assert sum(t.elements for t in found.tensors) == found.parameters
    assert [t.done for t in found.tensors] == sorted(t.done for t in found.tensors)
    assert found.tensors[-1].done == pytest.approx(1)


def test_most_bytes_of_vgg_are_ready_early_and_those_of_resnet_are_not():
    def early(name):
        tensors = network.profile(Recipe.model_validate({"model": {"name": name}}), 1000).tensors
        return sum(t.elements for t in tensors if t.done < 0.02) / sum(t.elements for t in tensors)

    assert early("vgg16") == pytest.approx(0.89, abs=0.02)  # its three linear layers
    assert early("resnet50") < 0.2


def test_frozen_parameters_are_not_sent():
    recipe = Recipe.model_validate({"model": {"name": "resnet18", "freeze": ("backbone",)}})
    assert [t.name for t in network.profile(recipe, 10).tensors] == ["fc.bias", "fc.weight"]


def test_activations_are_what_autograd_keeps():
    """A real forward pass keeps as many bytes as the pass on shapes says."""
    recipe = Recipe.model_validate({"model": {"name": "resnet18"}, "data": {"train_crop_size": 64}})
    found = network.profile(recipe, 10)
    real = networks.build(recipe, 10)
    weights = {p.data_ptr() for p in real.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        real(torch.zeros(2, 3, 64, 64))
    elements = sum(t.untyped_storage().nbytes() // t.element_size() for t in kept.values()) / 2
    assert found.activation_elements == pytest.approx(elements, rel=0.01)


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v3_large"])
def test_buckets_are_those_of_torch(alone, name):
    recipe = Recipe.model_validate({"model": {"name": name}, "data": {"train_crop_size": 32}})
    ddp = DistributedDataParallel(networks.build(recipe, 10), bucket_cap_mb=recipe.parallel.bucket_mb)
    sizes = []
    exchange = Exchange(torch.device("cpu"))
    hook = compression.Average(ddp.module, recipe.parallel, 1, exchange)

    def count(state, bucket):
        sizes.append(4 * bucket.buffer().numel())
        return hook.reduce(state, bucket)

    ddp.register_comm_hook(None, count)
    for _ in range(2):  # torch arranges its buckets again after the first backward pass
        sizes.clear()
        ddp(torch.zeros(2, 3, 32, 32)).sum().backward()
    ours = [message.size for message in traffic.of_recipe(recipe, network.profile(recipe, 10).tensors).messages]
    assert len(ours) == len(sizes)
    # Which of a block's gradients comes first differs: by a tensor at each end of a bucket.
    assert ours == pytest.approx(sizes, rel=0.12)


def test_powersgd_sends_what_the_hook_sends(alone):
    recipe = Recipe.model_validate(
        {"model": {"name": "resnet18"}, "parallel": {"compression": "powersgd", "powersgd_rank": 3}}
    )
    real = networks.build(recipe, 10)
    exchange = Exchange(torch.device("cpu"))
    hook = compression.PowerSGD(real, recipe.parallel, 1, exchange)
    hook._approximate({name: torch.randn_like(p) for name, p in real.named_parameters()})
    predicted = traffic.of_recipe(recipe, network.profile(recipe, 10).tensors)
    assert [len(predicted.messages), predicted.size] == [2, exchange.sent_bytes]


def traffic_of(tensors, **settings):
    return traffic.of_recipe(Recipe.model_validate({"parallel": settings, "epochs": 10}), tensors)


def test_strategies_send_at_their_own_times():
    tensors = network.profile(Recipe(), 1000).tensors
    plain = traffic_of(tensors)
    assert plain.size == 4 * 25_557_032
    assert traffic_of(tensors, compression="bf16").size == plain.size / 2
    assert [m.ready for m in traffic_of(tensors, compression="bf16").messages] == [m.ready for m in plain.messages]
    local = traffic_of(tensors, strategy="localsgd", local_steps=4)
    assert (local.every, local.size, len(local.messages)) == (4, plain.size, 1)
    assert traffic_of(tensors, strategy="localsgd", local_steps=4, local_after=5).every == pytest.approx(1 / (0.5 + 0.125))
    assert traffic_of(tensors, strategy="localsgd", average_momentum=True).size == 2 * plain.size
    assert [m.size for m in traffic_of(tensors, strategy="horovod").messages] == [plain.size]
    recipe = Recipe.model_validate({"parallel": {"strategy": "horovod"}})
    small = traffic.of_recipe(recipe, tensors, 64 * 2**20).messages
    assert all(m.size <= 64 * 2**20 for m in small) and len(small) == 2
    # 178 MB need two messages of at most 128 MiB; gradients are compressed before they are put together, so 89 MB one.
    large = network.profile(Recipe.model_validate({"model": {"name": "resnet101"}}), 1000).tensors
    full, half = (traffic_of(large, strategy="horovod", compression=name) for name in ("none", "fp16"))
    assert (len(full.messages), len(half.messages), half.size) == (2, 1, full.size / 2)


ASSUMED = {
    name: Prior(getattr(GPU, name), spread)
    for name, spread in zip(NAMES, (1.0, 0.7, 1, 0.5, 0.7, 0.06, 0.7, 0.5), strict=True)
}


def measured(cluster, batch, noise=0.0, split=True, hardware=CPU):
    step = model.step(hardware, EIGHTHS, cluster, batch)
    waits = (step.communication_s * (1 + noise), step.straggler_s * (1 + noise)) if split else (None, None)
    alone = cluster.devices == 1
    return Measurement(cluster, EIGHTHS, batch, 1, step.total_s * (1 + noise), *((None, None) if alone else waits), 0.01)


def test_one_and_two_processes_predict_four():
    seen = [measured(Cluster(1, 1), 16), measured(Cluster(1, 2), 16)]
    found = fit({**ASSUMED, "image_s": Prior(seen[0].step_s / 16, 1.0)}, seen)
    assert {"image_s", "contention", "local_bytes_per_s"} <= found.measured
    assert "link_bytes_per_s" not in found.measured  # no message left the machine
    for cluster in (Cluster(1, 2), Cluster(1, 4)):
        truth = model.step(CPU, EIGHTHS, cluster, 16)
        guess = model.step(found.best, EIGHTHS, cluster, 16)
        assert guess.total_s == pytest.approx(truth.total_s, rel=0.05)
        assert guess.exposed_s == pytest.approx(truth.exposed_s, rel=0.25)


def test_contention_and_jitter_far_from_the_assumptions_are_found():
    """Two processes with a tiny network on two busy cores: the times of a real benchmark."""
    sent = Traffic((Message(1.0, 6344),))
    seen = [
        Measurement(Cluster(1, 1), sent, 64, 2, 3.90e-3, spread=0.05),
        Measurement(Cluster(1, 2), sent, 64, 2, 9.25e-3, 3.67e-3, 1.37e-3, spread=0.05),
    ]
    known = {"local_bytes_per_s": Prior(2e9, 1.0), "contention": Prior(0.001, 1.0), "jitter": Prior(0.01, 0.5)}
    found = fit({**ASSUMED, **known, "image_s": Prior(6e-5, 1.0)}, seen)
    for measurement in seen:
        step = model.step(found.best, sent, measurement.cluster, 64, 2)
        assert step.total_s == pytest.approx(measurement.step_s, rel=0.05)
    assert step.straggler_s == pytest.approx(1.37e-3, rel=0.1)


def test_two_batches_tell_the_fixed_cost_from_the_rate():
    seen = [measured(Cluster(1, 1), batch, hardware=GPU) for batch in (8, 256)]
    found = fit({**ASSUMED, "pass_s": Prior(1e-3, 0.7), "image_s": Prior(seen[1].step_s / 256, 1.0)}, seen)
    assert found.best.pass_s == pytest.approx(4e-3, rel=0.1)
    assert found.best.image_s == pytest.approx(0.4e-3, rel=0.03)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """Of 30 noisy calibrations, about 27 should contain the true step at four processes between the 5th and the 95th."""
    noise = torch.Generator().manual_seed(1)
    covered = 0
    truth = total(CPU, EIGHTHS, Cluster(1, 4), 16)
    for _ in range(30):
        draws = [0.01 * torch.randn((), generator=noise).item() for _ in range(2)]
        seen = [measured(Cluster(1, 1), 16, draws[0]), measured(Cluster(1, 2), 16, draws[1])]
        found = fit({**ASSUMED, "image_s": Prior(seen[0].step_s / 16, 1.0)}, seen)
        steps = sorted(total(draw, EIGHTHS, Cluster(1, 4), 16) for draw in found.draws)
        covered += steps[10] <= truth <= steps[-11]
    assert 22 <= covered <= 30


def test_measurements_that_contradict_each_other_widen_the_range():
    """The standard error of the mean of three values has two degrees of freedom: one of them determines the mean."""
    seen = [Measurement(Cluster(1, 1), EIGHTHS, 16, 1, step_s, spread=0.01) for step_s in (0.9, 1.0, 1.1)]
    found = fit({**ASSUMED, "image_s": Prior(1 / 16, 1.0)}, seen)
    steps = [total(draw, EIGHTHS, Cluster(1, 1), 16) for draw in found.draws]
    assert statistics.stdev(steps) == pytest.approx(0.1 / math.sqrt(3), rel=0.1)


def test_without_measurements_the_assumptions_remain():
    found = fit(ASSUMED)
    for name in NAMES:
        assert getattr(found.best, name) == pytest.approx(ASSUMED[name].value)
        low, high = found.interval(name)
        assert math.log(high / low) == pytest.approx(2 * 1.645 * ASSUMED[name].spread, rel=0.25)
    assert found.measured == frozenset()
    assert fit(ASSUMED).draws == found.draws
