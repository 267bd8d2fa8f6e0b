"""`worldsize bench scaling`: which runs it makes, what it computes from them, and real runs that are interrupted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image

from paths import ENDED_NETWORK
from processes import worldsize
from scaled import CONSTANT, TINY, record, result
from worldsize.bench.launching import RunFailed
from worldsize.bench.scaling import local, measured, origin, table
from worldsize.bench.scaling.cases import Case, cases, in_rounds, recipe_of
from worldsize.bench.scaling.jobs import settings_of
from worldsize.bench.scaling.measured import PARTS
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.optim.schedules import peak_lr


def test_cases_are_all_combinations_in_order_of_their_size():
    found = cases(["ddp", "powersgd"], ["weak"], "1,2", "2,1")
    assert [(c.strategy, c.nodes, c.procs) for c in found[:4]] == [
        ("ddp", 1, 1), ("ddp", 1, 2), ("ddp", 2, 1), ("ddp", 2, 2),
    ]  # fmt: skip
    assert [c.strategy for c in found[4:]] == ["powersgd"] * 4
    assert [case for _, case in in_rounds(found[:2], 2)] == [found[0], found[1], found[1], found[0]]


def test_weak_scaling_keeps_the_images_per_process_and_strong_scaling_the_global_batch():
    base = recipe_files.load("digits").model_copy(update={"global_batch": 48, "micro_batch": 12})
    one, two = (recipe_of(Case("ddp", "weak", 1, procs), base, 1, 10, False) for procs in (1, 2))
    assert (one.global_batch, two.global_batch) == (48, 96)
    assert peak_lr(two.optimizer, 96) == pytest.approx(2 * peak_lr(one.optimizer, 48))
    assert recipe_of(Case("ddp", "strong", 1, 2), base, 1, 10, False).global_batch == 48
    # The smallest world size has the recipe's own batch.
    assert recipe_of(Case("ddp", "weak", 2, 4), base, 2, 10, False).global_batch == 192
    own = base.model_copy(update={"per_process_batch": 24})
    assert recipe_of(Case("ddp", "weak", 1, 4), own, 1, 10, False).per_process_batch == 24
    strong = recipe_of(Case("ddp", "strong", 1, 2), own, 2, 10, False)
    assert (strong.global_batch, strong.per_process_batch) == (48, None)


def test_a_strategy_alone_means_its_first_variant():
    def words(name: str) -> str:
        return " ".join(settings_of(Case(name, "weak", 2, 1)))

    assert words("ddp") == "" and words("ddp bf16") == "--parallel.compression bf16"
    assert words("horovod") == words("horovod MPI") == "--parallel.strategy horovod"
    with pytest.raises(UserError, match=r"'MPI' is unknown; available: .*horovod MPI"):
        words("MPI")


def test_a_run_that_is_stopped_before_its_last_step_has_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("EARLY_SIGNAL", "SIGTERM")
    base = recipe_files.load("digits")
    base = base.model_copy(update={"model": base.model.model_copy(update={"name": ENDED_NETWORK})})
    case = Case("ddp", "weak", 1, 1)
    with pytest.raises(RunFailed, match=r"(?s)ddp failed \(75\): .*stopped after step"):
        local.run(case, recipe_of(case, base, 1, 20, False), tmp_path, "a", 20, 1)


def test_a_run_measures_nothing_but_steps():
    recipe = recipe_of(Case("ddp", "weak", 1, 2), Recipe(global_batch=32, micro_batch=8), 1, 10, True)
    assert recipe.evaluate_every > recipe.epochs and recipe.data.name == "synthetic"
    assert recipe.checkpoint.every_epochs is recipe.checkpoint.every_steps is recipe.checkpoint.every_seconds is None
    assert recipe.data.samples >= 10 * recipe.global_batch == 640


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        (("cifar10",), 10),
        (("digits", "--data.classes", "7"), 7),
        (("imagenet",), 1000),
        (("imagenet", "--data.root", "here"), 2),
        (("cifar10", "--data.root", "elsewhere"), 10),
        (("imagenet", "--data.name", "folder", "--data.root", "elsewhere"), 1000),
    ],
)
def test_random_images_have_the_classes_of_the_recipe(tmp_path, monkeypatch, words, classes):
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "here" / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "here" / part / name / "1.png")
    monkeypatch.chdir(tmp_path)
    request = origin.with_classes(origin.parse([*words, "--synthetic"]))
    assert request.asked.settings.data.classes == classes
    assert recipe_of(Case("ddp", "weak", 1, 1), request.asked.settings, 1, 2, True).data.classes == classes


def test_the_parts_of_a_step_add_up():
    one = measured.of_steps(Case("ddp", "weak", 1, 2), 1, CONSTANT, [record(100, 40, 10, [9.0, 10.0])] * 4, 1, 3)
    assert sum(getattr(one, part) for part in PARTS) == pytest.approx(one.step_ms) == pytest.approx(100)
    assert (one.transfer_ms, one.straggler_ms, one.communication_ms) == (30, 10, 40)
    assert one.images_per_s == pytest.approx(640) and one.images_per_s_per_process == pytest.approx(320)
    assert one.global_batch == 64 and one.sent_mb == 2


@pytest.mark.parametrize(
    ("speeds", "rank"),
    [
        ([[10.0, 9.0, 10.0]] * 4, 1),
        ([[10.0, 9.0, 10.0], [9.0, 10.0, 10.0], [10.0, 10.0, 10.0], [10.0, 10.0, 9.9]], None),
        ([[]] * 4, None),
        ([[10.0]] * 4, None),
    ],
)
def test_a_rank_is_slow_if_it_is_often_behind(speeds, rank):
    records = [record(100, 40, 10, step) for step in speeds]
    assert measured.of_steps(Case("ddp", "weak", 1, 3), 1, CONSTANT, records, 0, 4).slowest_rank == rank


def test_of_many_ranks_the_slowest_are_listed():
    """Above 16 ranks a step has the four slowest and quantiles of all. JSON makes ranks strings."""

    def step(*slow):
        listed = {str(rank): 8.0 - at for at, rank in enumerate(reversed(slow))}
        many = {"rank_quantiles": [5.0, 9.5, 10.0, 10.5, 11.0], "slowest_ranks": listed}
        return record(100, 40, 10, []) | many

    def slowest(*records):
        return measured.of_steps(Case("ddp", "weak", 2, 16), 1, CONSTANT, records, 0, 4).slowest_rank

    assert slowest(step(7, 1, 2, 3), step(7, 4, 5, 6), step(9, 7, 1, 2), step(7, 3, 8, 9)) == 7
    assert slowest(step(7, 1, 2, 3), step(8, 1, 2, 3), step(9, 1, 2, 3), step(10, 1, 2, 3)) is None


def test_the_learning_rate_is_that_of_the_run():
    """In its warmup a step has a part of the peak."""
    recipe = Recipe.model_validate({"schedule": {"warmup_epochs": 5, "warmup_start": 0.0}, "epochs": 90})
    steps = [record(100, 0, 0, [1.0]) | {"step": n, "epoch": n / 10, "lr": 0.4 * (n - 1) / 50} for n in range(1, 6)]
    assert measured.of_steps(Case("ddp", "weak", 1, 1), 1, recipe, steps, 1, 4).lr == pytest.approx(0.4)
    results = [result(1, 100), result(2, 125)]
    assert "differ" not in table.what_scales("weak", results)
    other = dataclasses.replace(results[1], strategy="localsgd", lr=0.1)
    assert "; 2 processes differ in batch or learning rate: ddp 64 at 0.2, localsgd 64 at 0.1" in table.what_scales(
        "weak", [*results, other]
    )


def test_efficiency_compares_within_a_round():
    # The machine is half as fast in the second round.
    results = [result(1, 100), result(2, 125, 20), result(2, 250, 40, turn=2), result(1, 200, turn=2), result(4, 200, 90)]
    ratios = [one.efficiency for one in measured.with_efficiency(results)]
    assert ratios == pytest.approx([1, 0.8, 0.8, 1, 0.5])
    assert measured.with_efficiency([result(1, 100), result(2, 125, turn=2)])[1].efficiency is None


def test_the_verdict_names_what_costs_most():
    results = measured.with_efficiency([result(1, 100), result(2, 125, 20), result(4, 101)])
    sentences = table.verdicts(results)
    assert sentences[0] == (
        "ddp, weak scaling: 2 processes keep 80.0% of the images/s per process of 1; "
        "communication that computation does not hide costs 12.0% of a step"
    )
    assert sentences[1].endswith("4 processes keep 99.0% of the images/s per process of 1")
    assert "0.800 to 0.800" in table.table(results)
    assert table.what_scales("weak", results) == (
        "weak scaling: 32 images per process and step; global batch 32, 64, 128, peak learning rate 0.1, 0.2, 0.4"
    )


def test_strong_scaling_expects_less_computation_per_process():
    base = dataclasses.replace(result(1, 100), scaling="strong")
    half = dataclasses.replace(result(2, 53, images=16), scaling="strong")
    part, share = table.largest_loss([half], [base])
    # Half the images should wait half as long; the computation did shrink.
    assert part == "data_ms" and share == pytest.approx(2.5 / 53)


def test_a_damaged_line_is_left_out(tmp_path, caplog):
    path = tmp_path / "results.jsonl"
    measured.write(path, [result(1, 100), result(2, 125)])
    assert measured.read(path)[1].efficiency == 0.8
    path.write_text(path.read_text()[:-30])
    assert [one.world_size for one in measured.read(path)] == [1]
    assert "line 2 is damaged" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--procs", "2"), "several world sizes"),
        (("--procs", "1,many"), "--procs '1,many': pass positive numbers"),
        (("--nodes", "1,2"), "several nodes require a cluster"),
        (("--strong", "--procs", "1,3"), "ddp, strong, 1 x 3: "),
        (("--strong", "--procs", "1,3"), "World sizes that fit: 1, 2"),
        (("--strategies", "dpp"), "--strategies 'dpp' is unknown"),
        (("--steps", "0"), "--steps and --rounds must be positive"),
        (("--on", "pytorchjob"), "jobs on a cluster need --image"),
        (
            ("--on", "local,pytorchjobs"),
            "'pytorchjobs' is unknown; did you mean 'pytorchjob'?; available: local, pytorchjob",
        ),
        (("--on", "mpijob", "--strategies", "x", "--", "--image", "I", "--volume", "v"), "--strategies 'x' is unknown"),
        (("--", "--image", "I"), "--image: options after `--` are for jobs on a cluster"),
        (("--resume", "."), "not the folder of a scaling benchmark"),
    ],
)
def test_mistakes_are_reported_before_any_run(fails, tmp_path, arguments, message):
    assert message in fails("bench", "scaling", *TINY, *arguments)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_real_runs_and_their_continuation(tmp_path):
    done = worldsize("bench", "scaling", *TINY, "--both", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "bench-scaling-1"
    results = measured.read(folder / "results.jsonl")
    assert {(r.scaling, r.world_size, r.global_batch) for r in results} == {
        ("weak", 1, 8), ("weak", 2, 16), ("strong", 1, 8), ("strong", 2, 8),
    }  # fmt: skip
    assert len(results) == 8 and all(r.efficiency == 1 for r in results if r.world_size == 1)
    for one in results:
        assert sum(getattr(one, part) for part in PARTS) == pytest.approx(one.step_ms, rel=0.01)
        assert (one.sent_mb > 40) == (one.world_size == 2)  # 11 million gradients of 4 bytes
    assert json.loads((folder / "bench.json").read_text())["kind"] == "scaling"
    assert "keep" in done.stdout and (folder / "table.md").read_text() in done.stdout
    _without_the_last_two(folder)
    again = worldsize("bench", "scaling", *TINY, "--both", "--resume", folder, cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.count("images/s, ") == 2, again.stdout + again.stderr
    after = measured.read(folder / "results.jsonl")
    assert len(after) == 8 and after[:6] == results[:6]


def _without_the_last_two(folder: Path) -> None:
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(lines[:-2]))
