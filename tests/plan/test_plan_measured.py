"""Plans that are calibrated with measurements."""

from __future__ import annotations

import json

import pytest

from paths import ROOT
from planned import CPU, OF_RESULTS, forecasts, plan, results
from processes import worldsize
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.plan import measured as measurements
from worldsize.plan import model, network
from worldsize.plan.model import Cluster
from worldsize.runs.history import History

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


def test_a_plan_from_bench_scaling_predicts_the_next_size(tmp_path, capsys):
    folder, _, sent = results(tmp_path / "bench")
    path = tmp_path / "plan.json"
    settings = ("--model.name", "resnet18", "--data.train-crop-size", "32", "--device", "cpu", "--micro-batch", "16")
    batch = ("--global-batch", "16", "--weak", "--devices", "1,2,4")
    plan("cifar10", *settings, "--model.stem", "imagenet", *batch, "--from", folder, "--json", path)
    truth = model.step(CPU, sent, Cluster(1, 4), 16)
    assert forecasts(path)[4]["step_s"]["value"] == pytest.approx(truth.total_s, rel=0.05)


def test_a_second_gradient_costs_more_than_what_was_measured_without(tmp_path):
    folder, _, _ = results(tmp_path / "bench")

    def step(*more):
        asked = ("cifar10", *OF_RESULTS, "--global-batch", "16", "--weak", "--devices", "1,2", *more)
        plan(*asked, "--from", folder, "--json", tmp_path / "plan.json")
        return [forecasts(tmp_path / "plan.json")[n]["step_s"]["value"] for n in (1, 2)]

    assert step("--optimizer.sam-rho", "0.5") == pytest.approx([2 * s for s in step()], rel=0.01)


def test_results_that_do_not_fit_are_refused(tmp_path, fails):
    wrong, _, _ = results(tmp_path / "wrong", sent_mb=3.0)
    settings = ("--model.name", "resnet18", "--data.train-crop-size", "32", "--model.stem", "imagenet", "--devices", "1")
    assert "each process sent 3.0 MB per step" in fails("plan", "cifar10", *settings, "--from", wrong)
    other, _, _ = results(tmp_path / "other", strategy="localsgd")
    assert "the recipe's strategy was not measured, only localsgd" in fails("plan", "cifar10", *settings, "--from", other)


RESULTS = ROOT / "benchmarks" / "results"


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


def test_of_several_kinds_of_jobs_one_is_used(tmp_path, capsys):
    folder, _, _ = results(tmp_path / "bench")
    out = tmp_path / "plan.json"
    words = ("cifar10", *OF_RESULTS, "--global-batch", "16", "--devices", "1", "--from", folder, "--json", out)
    plan(*words)
    alone = forecasts(out)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    with (folder / "results.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps(line | {"kind_of_job": "mpijob", "step_ms": 9 * line["step_ms"]}) + "\n")
    capsys.readouterr()
    plan(*words)
    assert "of several kinds of jobs, only local is used." in " ".join(capsys.readouterr().out.split())
    assert forecasts(out) == alone


def test_of_a_run_that_was_resumed_at_another_world_size_the_last_one_is_used(tmp_path, capfd, fails):
    run, out = tmp_path / "run", tmp_path / "plan.json"
    run.mkdir()
    asked = ("cifar10", *OF_RESULTS, "--global-batch", "32", "--devices", "2", "--from", run, "--json", out)
    _, recipe, sent = results(tmp_path / "bench")
    changes = {"global_batch": 32, "micro_batch": 16, "device": "cpu"}
    (run / "recipe.yaml").write_text(recipe_files.to_yaml(recipe.model_copy(update=changes)))
    (run / "environment.json").write_text(json.dumps({"world_size": 2, "hardware": {"cuda": None}}))
    times = {"data_ms": 0.0, "communication_ms": 10.0, "straggler_ms": 5.0, "sent_bytes": sent.size}
    # Runs of older versions have no history.
    lines = [{"kind": "step", "step": n, "step_ms": 900.0 if n <= 30 else 500.0 + n % 3, **times} for n in range(1, 51)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan(*asked)
    assert forecasts(out)[2]["step_s"]["value"] > 0.7 and "left out" not in capfd.readouterr().out
    History(run / "history.jsonl").add("started", 0, world_size=1)
    History(run / "history.jsonl").add("started", 30, world_size=2)
    plan(*asked)
    assert forecasts(out)[2]["step_s"]["value"] == pytest.approx(0.5, rel=0.05)
    assert "the steps up to 30 are left out: the run had another number" in " ".join(capfd.readouterr().out.split())
    History(run / "history.jsonl").add("started", 44, world_size=1)
    assert "has 3 steps after its first 3 since it was resumed at another world size, after step 44" in fails("plan", *asked)


def test_a_run_with_sharpness_aware_minimization_calibrates_its_own_plan(tmp_path):
    """Every fourth step takes twice as long and sends twice as much."""
    run, out = tmp_path / "run", tmp_path / "plan.json"
    run.mkdir()
    _, recipe, sent = results(tmp_path / "bench")
    sam = recipe.optimizer.model_copy(update={"sam_rho": 0.05, "sam_every": 4})
    changes = {"global_batch": 32, "micro_batch": 16, "device": "cpu", "optimizer": sam}
    (run / "recipe.yaml").write_text(recipe_files.to_yaml(recipe.model_copy(update=changes)))
    (run / "environment.json").write_text(json.dumps({"world_size": 2, "hardware": {"cuda": None}}))
    lines = []
    for number in range(43):
        twice = 1 + (number % 4 == 0)
        times = {"step_ms": 400.0 * twice, "communication_ms": 10.0 * twice, "straggler_ms": 5.0 * twice, "data_ms": 0.0}
        lines.append({"kind": "step", "step": number + 1, "sent_bytes": sent.size * twice, **times})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = ("--optimizer.sam-rho", "0.05", "--optimizer.sam-every", "4", "--global-batch", "32", "--devices", "2")
    plan("cifar10", *OF_RESULTS, *more, "--from", run, "--json", out)
    assert forecasts(out)[2]["step_s"]["value"] == pytest.approx(0.5, rel=0.05)


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
