"""`worldsize plan`: what a job needs, and the command."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from planned import EIGHTHS, GPU, OF_RESULTS, forecasts, plan, results
from worldsize.cli import main
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.data.images.crops import crop_size
from worldsize.models import networks
from worldsize.optim import optimizers
from worldsize.plan import forecast, model, traffic
from worldsize.plan.arguments import Feed
from worldsize.plan.forecast import cluster_of
from worldsize.plan.job import describe

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


PLAIN = {"momentum": 0, "nesterov": False}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {}) for name in ("sgd", "adamw", "rmsprop", "lars", "lamb", "nadamw", "lion")),
        ("sgd", PLAIN),
        ("lion", PLAIN),
    ],
)
def test_optimizers_keep_what_the_plan_says(name, more):
    recipe = Recipe.model_validate({"model": {"name": "squeezenet1_1"}, "optimizer": {"name": name, **more}})
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
        job = describe(recipe, Feed(), 1, False)
        return job.evaluation_work(job.plan(1))

    assert work() == pytest.approx(90 * 50_000 / 3)
    assert work(val_mirror=True) == pytest.approx(2 * work())
    assert work(val_ten_crop=True) == pytest.approx(10 * work())


@pytest.mark.parametrize(
    ("max_steps", "every", "evaluations", "saves"),
    [
        (None, 1, 90, 31),
        (None, 4, 23, 31),
        (1000, 1, 1, 1),
        (0, 1, 1, 1),
        (5004, 1, 1, 1),
        (5005, 1, 2, 1),
        (15012, 2, 2, 2),
    ],
)
def test_a_run_that_ends_early_evaluates_and_saves_less(max_steps, every, evaluations, saves):
    """5,004 steps of 256 images are an epoch."""
    values = {"max_steps": max_steps, "evaluate_every": every, "model": {"name": "squeezenet1_1"}}
    values |= {"data": {"name": "imagenet"}, "checkpoint": {"every_epochs": 3, "every_seconds": None}}
    job = describe(Recipe.model_validate(values), Feed(), 1, False)
    assert (job.evaluations(job.plan(8)), job.saves(job.plan(8), 1e6)) == (evaluations, saves)
    assert job.evaluation_work(job.plan(8)) == pytest.approx(evaluations * 50_000 / 3)


@pytest.mark.parametrize(("every", "gradients"), [(1, 2), (4, 1.25)])
def test_sharpness_aware_minimization_costs_a_second_gradient(tmp_path, every, gradients):
    def parts(*more):
        plan("imagenet", "--devices", "8", "--json", tmp_path / "plan.json", *more)
        return forecasts(tmp_path / "plan.json")[8]["step"]

    before, after = parts(), parts("--optimizer.sam-rho", "0.5", "--optimizer.sam-every", every)
    for part in ("images_s", "fixed_s", "straggler_s", "exposed_s", "busy_s", "total_s"):
        assert after[part] == pytest.approx(gradients * before[part])


def test_progressive_resizing_costs_less():
    def work(recipe, **values):
        job = describe(recipe_files.load(recipe).model_copy(update=values), Feed(), 1, False)
        return job.relative_work(job.plan(8))

    data = recipe_files.load("imagenet-ffcv-rn50-16").data
    whole = work("imagenet-ffcv-rn50-16")
    assert 0.5 < whole < 1
    assert work("imagenet-ffcv-rn50-16", max_steps=100) == pytest.approx((crop_size(data, 0) / data.train_crop_size) ** 2)
    assert work("imagenet-ffcv-rn50-16", max_steps=0) == work("imagenet") == 1


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
    # On GPUs, the network is compiled already.
    assert ("half the fixed cost (try --model.compile)" in gains) == (settings == ("--device", "cpu"))


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
        (
            ["imagenet", "--parallel.strategy", "localsgd", "--parallel.compression", "bf16"],
            "no effect with strategy localsgd",
        ),
        (["imagenet", "--parallel.strategy", "horovod", "--parallel.compression", "bf16"], "cannot send gradients as bf16"),
        (
            ["digits", "--parallel.strategy", "single", "--devices", "1,8"],
            "--devices 8: strategy single runs in one process",
        ),
        (
            ["imagenet", *["--data.train-crop-sizes", "100", "224", "--data.train-crop-epochs", "5", "10"]],
            "data.train_crop_sizes 100 is not a multiple",
        ),
        (["imagenet", "--devices", "8", "--from", "nowhere"], "--from nowhere: neither a run"),
        (["imagenet", "--data.train-crop-size", "16", "--model.name", "inception_v3"], "on shapes of 16 pixels"),
        ([], "RECIPE is required"),
    ],
)
def test_mistakes_are_explained(fails, arguments, says):
    assert says in fails("plan", *arguments)


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        (("--parallel.strategy", "single"), [1]),
        (("--parallel.strategy", "single", "--devices", "1"), [1]),
        # One device is what efficiency refers to, although neither is trained with one process.
        (("--parallel.strategy", "localsgd", "--devices", "1,2"), [1, 2]),
        (("--parallel.compression", "bf16", "--devices", "1,2"), [1, 2]),
    ],
)
def test_one_device_is_planned_for_all_strategies(tmp_path, settings, devices):
    plan("digits", *settings, "--json", tmp_path / "plan.json")
    assert list(forecasts(tmp_path / "plan.json")) == devices


def test_a_folder_of_images_needs_its_size(fails, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("data: {name: folder}\n")
    assert "--train-images N" in fails("plan", recipe)
    plan(recipe, "--train-images", "5000", "--val-images", "500", "--classes", "7", "--devices", "8")


@pytest.mark.parametrize("name", ["a[/b].yaml", "my[v2].yaml", "my:smile:.yaml"])
def test_the_name_of_a_recipe_is_shown_as_it_is(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("base: digits\n")
    assert main(["plan", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: ")
