"""`worldsize plan`: the cost model, what strategies send, the fit to measurements, and the command."""

from __future__ import annotations

import ast
import json
import math
import re
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

from paths import ROOT
from processes import worldsize
from worldsize import cli
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.models import networks
from worldsize.optim import optimizers
from worldsize.parallel.base import Exchange
from worldsize.parallel.ddp import compression
from worldsize.plan import forecast, model, network, traffic
from worldsize.plan import measured as measurements
from worldsize.plan.arguments import Feed
from worldsize.plan.fit import NAMES, Measurement, Prior, fit
from worldsize.plan.forecast import cluster_of
from worldsize.plan.job import describe
from worldsize.plan.model import Cluster, Hardware, Message, Traffic

GPU = Hardware(
    image_s=0.4e-3,
    pass_s=4e-3,
    contention=0.001,
    jitter=0.01,
    link_latency_s=10e-6,
    link_bytes_per_s=2.8e9,
    local_latency_s=5e-6,
    local_bytes_per_s=50e9,
)
EIGHTHS = Traffic(tuple(Message((i + 1) / 8, 12.5e6) for i in range(8)))
parameters = st.builds(
    Hardware,
    *(st.floats(1e-5, 1e-1), st.floats(1e-5, 1e-2), st.floats(1e-6, 0.5), st.floats(1e-5, 0.3)),
    *(st.floats(1e-7, 1e-3), st.floats(1e7, 1e12), st.floats(1e-7, 1e-3), st.floats(1e7, 1e12)),
)
clusters = st.builds(Cluster, st.integers(1, 600), st.integers(1, 16))
sent = st.builds(
    lambda sizes, every: Traffic(tuple(Message((i + 1) / len(sizes), s) for i, s in enumerate(sizes)), every),
    *(st.lists(st.floats(1e3, 1e9), min_size=1, max_size=8), st.floats(1, 16)),
)
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


# The fit ------------------------------------------------------------------------------------------------------------------

# A machine unlike the assumptions: CPU processes over a slow loopback.
CPU = Hardware(0.03, 0.02, 0.08, 0.03, 10e-6, 1e8, 50e-6, 4e8)
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


# The job ------------------------------------------------------------------------------------------------------------------


def test_memory_is_exact_where_it_can_be():
    job = describe(Recipe.model_validate({"data": {"name": "imagenet"}}), Feed(), 1, False)
    held = job.memory(job.plan(8))
    size = 4 * 25_557_032
    assert (held["weights"], held["gradients"], held["optimizer"], held["buffers"]) == (size, size, size, 0)
    assert "average" not in held
    ema = job.recipe.model_copy(update={"average": job.recipe.average.model_copy(update={"name": "ema"})})
    assert replace(job, recipe=ema).memory(job.plan(8))["average"] == size
    adam = job.recipe.model_copy(update={"optimizer": job.recipe.optimizer.model_copy(update={"name": "adamw"})})
    assert replace(job, recipe=adam).memory(job.plan(8))["optimizer"] == 2 * size


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop", "lars", "lamb"])
def test_optimizers_keep_what_the_plan_says(name):
    recipe = Recipe.model_validate({"model": {"name": "squeezenet1_1"}, "optimizer": {"name": name}})
    real = networks.build(recipe, 10)
    optimizer = optimizers.build(real, recipe.optimizer, torch.device("cpu"))
    for parameter in real.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(t.numel() for t in optimizers.state_tensors(optimizer, real).values() if t.ndim)
    assert kept == traffic.optimizer_tensors(recipe) * sum(p.numel() for p in real.parameters())


def test_the_files_of_a_folder_are_measured(tmp_path):
    for split in ("train", "val"):
        for at, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.jpg").write_bytes(bytes(1000 + 4000 * at))
    recipe = Recipe.model_validate({"data": {"name": "folder", "root": tmp_path}, "model": {"name": "squeezenet1_1"}})
    assert describe(recipe, Feed(), 1, False).images.file_bytes == 3000
    assert describe(recipe, Feed(image_kb=7), 1, False).images.file_bytes == 7000


def test_a_machine_that_is_not_full_is_not_filled_up():
    assert [(c.nodes, c.per_node, c.devices) for c in (cluster_of(n, 8) for n in (5, 8, 9, 16))] == [
        (1, 5, 5), (1, 8, 8), (2, 4.5, 9), (2, 8, 16),
    ]  # fmt: skip
    step = model.step(GPU, EIGHTHS, cluster_of(9, 8), 32)
    assert step.total_s > model.step(GPU, EIGHTHS, cluster_of(8, 8), 32).total_s


def test_only_the_measured_batch_is_known(tmp_path, monkeypatch):
    """Two devices at another batch per device differ from the model as any size that was not measured."""
    folder, _, _ = results(tmp_path / "bench")
    monkeypatch.setattr(forecast, "MODEL_ERROR", 1.0)

    def spread(batch, *more):
        path = tmp_path / "plan.json"
        plan("cifar10", *OF_RESULTS, "--global-batch", batch, "--devices", "2", *more, "--from", folder, "--json", path)
        step = forecasts(path)[2]["step_s"]
        return math.log(step["high"] / step["low"])

    assert spread("32") < 1.5  # the rounds differ
    assert spread("512") > 2
    assert spread("32", "--devices-per-node", "1") > 2


def test_evaluations_with_several_views_cost_more():
    def work(**data):
        recipe = Recipe.model_validate({"data": {"name": "imagenet", **data}, "model": {"name": "squeezenet1_1"}})
        return describe(recipe, Feed(), 1, False).evaluation_work()

    assert work() == pytest.approx(90 * 50_000 / 3)
    assert work(val_mirror=True) == pytest.approx(2 * work())
    assert work(val_ten_crop=True) == pytest.approx(10 * work())


def test_progressive_resizing_costs_less():
    job = describe(recipe_files.load("imagenet-ffcv-rn50-16"), Feed(), 1, False)
    assert 0.5 < job.relative_work() < 1
    assert describe(recipe_files.load("imagenet"), Feed(), 1, False).relative_work() == 1


# The command --------------------------------------------------------------------------------------------------------------


def plan(*arguments):
    assert cli.main(["plan", *map(str, arguments)]) == 0


def forecasts(path):
    return {f["devices"]: f for f in json.loads(path.read_text())["forecasts"]}


def test_the_command_predicts_weak_and_strong_scaling(tmp_path, capsys):
    path = tmp_path / "plan.json"
    plan("imagenet", "--devices", "1,8,64", "--global-batch", "8192", "--price-per-hour", "2.5", "--json", path)
    strong = forecasts(path)
    assert [f["batch_per_device"] for f in strong.values()] == [8192, 1024, 128]
    assert {f["global_batch"] for f in strong.values()} == {8192}
    for devices, f in strong.items():
        for name in ("step_s", "images_per_s", "efficiency", "duration_s", "price"):
            assert f[name]["low"] <= f[name]["value"] <= f[name]["high"]
        assert f["efficiency"]["high"] <= 1 + 1e-9
        assert f["price"]["value"] == pytest.approx(f["duration_s"]["value"] / 3600 * devices * 2.5)
        assert f["storage_bytes_per_s"] == pytest.approx(f["images_per_s"]["value"] * 110e3)
    shown = capsys.readouterr().out
    assert "No measurements" in shown and "fixed time per pass" in shown and "64 devices:" in shown
    plan("imagenet", "--devices", "1,8,64", "--weak", "--json", path)
    weak = forecasts(path)
    assert [f["batch_per_device"] for f in weak.values()] == [256] * 3
    assert weak[64]["efficiency"]["value"] < weak[8]["efficiency"]["value"] < 1


def test_the_bottleneck_follows_the_machines(tmp_path):
    path = tmp_path / "plan.json"

    def bottleneck(*more):
        plan("imagenet", "--devices", "64", "--global-batch", "16384", "--json", path, *more)
        return forecasts(path)[64]

    assert bottleneck()["bottleneck"] == "compute"
    slow = bottleneck("--node-bandwidth-gbit", "5")
    assert slow["bottleneck"] == "communication"
    gains = {lever["change"]: lever["gain"] for lever in slow["levers"]}
    assert gains["--parallel.compression bf16"] > 0.1
    compressed = bottleneck("--node-bandwidth-gbit", "5", "--parallel.compression", "bf16")
    faster = compressed["images_per_s"]["value"] / slow["images_per_s"]["value"] - 1
    assert gains["--parallel.compression bf16"] == pytest.approx(faster, abs=0.01)
    starved = bottleneck("--cores-per-device", "1")
    assert starved["bottleneck"] == "loading images"
    assert starved["images_per_s"]["value"] == pytest.approx(64_000)
    assert bottleneck("--storage-gbyte", "1.1")["images_per_s"]["value"] == pytest.approx(10_000)


def test_parameters_have_names_and_units_of_their_own(capsys):
    """The rate is not --images-per-s, which includes the fixed time; the bandwidth is what messages reach."""
    rates = ("--images-per-s", "2470@256,1900@64", "--node-bandwidth-gbit", "25")
    plan("imagenet", "--devices", "8", *rates, "--jitter", "0.02", "--link-efficiency", "0.5")
    rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: " ".join(row[1:]) for row in rows}
    assert re.fullmatch(r"2,732 images/s .* given", shown["rate without fixed time"])
    assert re.fullmatch(r"10.2 ms .* given", shown["fixed time per pass"])  # from the two rates; nothing was measured
    assert re.fullmatch(r"0.02 .* given", shown["jitter"])
    assert re.fullmatch(r"12.5 Gbit/s .* given", shown["usable network bandwidth"])
    plan("imagenet", "--devices", "8", "--link-efficiency", "0.5")
    assert re.search(r"usable network bandwidth +50 +Gbit/s .* given", capsys.readouterr().out)


@pytest.mark.parametrize("settings", [("--device", "cpu"), ("--forward-batch", "32")])
def test_a_lever_gains_what_a_plan_with_it_does(tmp_path, settings):
    """Larger batches have more passes, not larger ones, on CPUs and with a fixed forward batch."""
    path = tmp_path / "plan.json"

    def predicted(batch, *more):
        slow = ("--node-bandwidth-gbit", "1", "--fixed-ms", "300", "--images-per-s", "300@32")
        plan("imagenet", "--devices", "16", "--global-batch", batch, "--micro-batch", "32", *slow, *more, "--json", path)
        return forecasts(path)[16]

    one, two = (predicted(batch, *settings, "--parallel.compression", "powersgd") for batch in (1024, 2048))
    gains = {lever["change"]: lever["gain"] for lever in one["levers"]}
    real = two["images_per_s"]["value"] / one["images_per_s"]["value"] - 1
    assert gains.get("twice the global batch", 0.0) == pytest.approx(real, abs=0.01)
    assert one["bottleneck"] == "fixed cost per pass"
    merged = predicted(
        1024, *settings[:-2], "--device", "cpu", "--forward-batch", "64", "--parallel.compression", "powersgd"
    )
    real = merged["images_per_s"]["value"] / one["images_per_s"]["value"] - 1
    assert gains["--forward-batch 64"] == pytest.approx(real, abs=0.01)
    assert "half the fixed cost (try --model.compile)" in gains


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["imagenet", "--devices", "12"], "World sizes that fit: 1, 2, 4, 8"),
        (["imagenet", "--devices", "8,x"], "pass numbers of devices"),
        (["imagenet", "--images-per-s", "fast"], "pass a rate such as 2470"),
        (["imagenet", "--link-latency-us", "-1"], "--link-latency-us -1 must be positive"),
        (["imagenet", "--jitter", "nan"], "--jitter nan must be positive and finite"),
        (["imagenet", "--cores-per-device", "inf"], "--cores-per-device inf must be positive and finite"),
        (["imagenet", "--price-per-hour", "nan"], "--price-per-hour nan: pass a price"),
        (["imagenet", "--devices", "8", "--parallel.strategy", "async"], "no model of strategy async"),
        (["imagenet", "--devices", "8", "--from", "nowhere"], "--from nowhere: neither a run"),
        (["imagenet", "--data.train-crop-size", "16", "--model.name", "inception_v3"], "on shapes of 16 pixels"),
        ([], "RECIPE is required"),
    ],
)
def test_mistakes_are_explained(fails, arguments, says):
    assert says in fails("plan", *arguments)


def test_a_folder_of_images_needs_its_size(fails, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("data: {name: folder}\n")
    assert "--train-images N" in fails("plan", recipe)
    plan(recipe, "--train-images", "5000", "--val-images", "500", "--classes", "7", "--devices", "8")


# Real measurements --------------------------------------------------------------------------------------------------------

TINY = ("--model.name", "mobilenet_v3_small", "--micro-batch", "8", "--device", "cpu")


def measured_here(folder):
    """Real runs with one and two processes."""
    for procs in (1, 2):
        more = ("--global-batch", 8 * procs, "--max-steps", 12, "--procs", procs, "--name", f"w{procs}")
        done = worldsize("train", "digits", *TINY, *more, "--out", folder, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder / "w1", folder / "w2"


def step_seconds(run):
    """The median time of a step, without its wait for data."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = sorted(line["step_ms"] - line["data_ms"] for line in lines if line["kind"] == "step" and line["step"] > 3)
    return steps[len(steps) // 2] / 1000


@pytest.mark.slow
def test_a_plan_from_real_runs_agrees_with_them(tmp_path, capfd, fails):
    """At least once in three tries, because other programs may slow down one of the runs."""
    assert any(agrees(tmp_path / str(number), capfd) for number in range(3))
    assert "measured with model.name mobilenet_v3_small" in fails("plan", "digits", "--from", tmp_path / "0" / "w1")


def agrees(folder, capfd):
    folder.mkdir()
    path, runs = folder / "plan.json", measured_here(folder)
    plan("digits", *TINY, "--global-batch", "8", "--weak", "--devices", "1,2,4", "--from", *runs, "--json", path)
    assert "Calibrated with 2 measurements at 1, 2 devices" in capfd.readouterr().out
    assert json.loads(path.read_text())["fitted"]["image_s"]["source"] == "measured"
    predicted = forecasts(path)
    return [predicted[procs]["step_s"]["value"] for procs in (1, 2)] == pytest.approx(
        [*map(step_seconds, runs)], rel=0.3
    ) and predicted[4]["efficiency"]["value"] < predicted[2]["efficiency"]["value"] < 1


def results(folder, **changed):
    """The results of `bench scaling` on a machine like CPU, whose speed differs from round to round."""
    folder.mkdir()
    recipe = Recipe.model_validate({"model": {"name": "resnet18"}, "data": {"name": "cifar10", "train_crop_size": 32}})
    sent = traffic.of_recipe(recipe, network.profile(recipe, 10).tensors)
    lines = []
    for procs in (1, 2):
        step = model.step(CPU, sent, Cluster(1, procs), 16)
        for turn in (1, 2, 3):
            noise = (1.0, 1.6, 0.8)[turn - 1] * (1 + 0.003 * (turn - 2) * (procs - 1))
            line = {"kind_of_job": "local", "strategy": "ddp", "scaling": "weak", "nodes": 1, "procs": procs}
            line |= {"world_size": procs, "round": turn, "global_batch": 16 * procs, "lr": 0.1, "data_ms": 0.1}
            unit = 1000 * noise
            line |= {"step_ms": unit * step.total_s + 0.1, "compute_ms": unit * step.compute_s}
            line |= {"communication_ms": unit * step.communication_s, "straggler_ms": unit * step.straggler_s}
            lines.append(line | {"sent_mb": sent.size / 1e6 * (procs > 1)} | changed)
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ddp-weak-1x1-1.yaml").write_text(recipe_files.to_yaml(recipe))
    return folder, recipe, sent


def test_a_plan_from_bench_scaling_predicts_the_next_size(tmp_path, capsys):
    folder, _, sent = results(tmp_path / "bench")
    path = tmp_path / "plan.json"
    settings = ("--model.name", "resnet18", "--data.train-crop-size", "32", "--device", "cpu", "--micro-batch", "16")
    batch = ("--global-batch", "16", "--weak", "--devices", "1,2,4")
    plan("cifar10", *settings, "--model.stem", "imagenet", *batch, "--from", folder, "--json", path)
    truth = model.step(CPU, sent, Cluster(1, 4), 16)
    assert forecasts(path)[4]["step_s"]["value"] == pytest.approx(truth.total_s, rel=0.05)


def test_results_that_do_not_fit_are_refused(tmp_path, fails):
    wrong, _, _ = results(tmp_path / "wrong", sent_mb=3.0)
    settings = ("--model.name", "resnet18", "--data.train-crop-size", "32", "--model.stem", "imagenet", "--devices", "1")
    assert "each process sent 3.0 MB per step" in fails("plan", "cifar10", *settings, "--from", wrong)
    other, _, _ = results(tmp_path / "other", strategy="localsgd")
    assert "the recipe's strategy was not measured, only localsgd" in fails("plan", "cifar10", *settings, "--from", other)


RESULTS = ROOT / "benchmarks" / "results"
OF_RESULTS = (
    *("--model.name", "resnet18", "--model.stem", "imagenet", "--data.train-crop-size", "32"),
    *("--device", "cpu", "--micro-batch", "16"),
)


def test_jobs_on_a_cluster_measured_what_their_command_says(fails, tmp_path):
    """Of jobs, only results.jsonl and bench.json are kept: 32-pixel images on CPUs."""
    kept = RESULTS / "cluster" / "pytorchjob"
    asked = ("--devices", "2", "--global-batch", "32", "--micro-batch", "8")
    assert "train_crop_size 32, but the recipe has 224" in fails("plan", "imagenet", *asked, "--from", kept)
    plan("digits", *asked, "--from", kept, "--json", tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert forecasts(tmp_path / "plan.json")[2]["memory"]["activations"] < 2**26  # forward passes of 8 images: CPUs
    assert values["fitted"]["image_s"]["source"] == "measured"
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "results.jsonl").write_text((kept / "results.jsonl").read_text())
    assert "says which network was measured" in fails("plan", "digits", *asked, "--from", tmp_path / "bare")


def test_any_build_of_horovod_measures_horovod(tmp_path, fails):
    asked = ("cifar10", *OF_RESULTS, "--global-batch", "32", "--devices", "2", "--parallel.strategy", "horovod")
    folder, _, _ = results(tmp_path / "mpi", strategy="horovod MPI")
    plan(*asked, "--from", folder)
    adasum, _, _ = results(tmp_path / "adasum", strategy="horovod MPI adasum")
    assert "only horovod MPI adasum" in fails("plan", *asked, "--from", adasum)


def test_an_incomplete_line_is_left_out_and_noted(tmp_path, capsys):
    folder, _, _ = results(tmp_path / "bench")
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"strategy": "ddp", "wor')
    plan("cifar10", *OF_RESULTS, "--global-batch", "16", "--devices", "1", "--from", folder)
    assert "results.jsonl: 1 incomplete line not used." in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("content", [None, "{}", "[", '{"world_size": 1, "hardware": null}'])
def test_a_run_without_its_environment_is_refused(tmp_path, fails, content):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(recipe_files.to_yaml(recipe_files.load("digits")))
    (run / "metrics.jsonl").write_text("")
    if content is not None:
        (run / "environment.json").write_text(content)
    assert "environment.json" in fails("plan", "digits", "--devices", "1", "--from", run)


def test_runs_of_older_versions_say_on_what_they_ran(tmp_path):
    """Their environment.json has no hardware."""
    (tmp_path / "environment.json").write_text((RESULTS / "digits" / "environment.json").read_text())
    assert measurements._on_cpu(measurements._facts(tmp_path / "environment.json"))


def test_the_layers_of_a_network_without_parts_are_covered():
    """A parameter that belongs to no module of its own, as in vision transformers."""
    found = network.profile(Recipe.model_validate({"model": {"name": "vit_b_16"}}), 1000)
    done = {t.name: t.done for t in found.tensors}
    assert done["class_token"] == pytest.approx(1)
    assert done["heads.head.weight"] < 0.01
