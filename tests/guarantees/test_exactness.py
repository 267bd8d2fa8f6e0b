"""The central guarantee: every world size computes the same, correct numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import reference
from paths import SMALL_NETWORK
from processes import average_of, distance, identical, losses, momentum, overall_distance, weights

SMALL = "mobilenet_v3_small"
STEPS = 12


@pytest.fixture(scope="module")
def runs(ranks):
    """runs(size, precision, model, steps) trains once and returns the run folder."""
    cwd = ranks.cwd

    def run(size: int, precision: str = "fp64", model: str = SMALL, steps: int = STEPS, sabotage: str | None = None) -> Path:
        name = f"{Path(model).stem}-{precision}-{steps}-{size}-{sabotage}"
        if not (cwd / "runs" / name).exists():
            (cwd / f"{name}.yaml").write_text(reference.RECIPE.format(precision=precision, model=model))
            ranks(size, sabotage=sabotage).run("train", f"{name}.yaml", "--max-steps", str(steps), "--name", name)
        return cwd / "runs" / name

    return run


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (SMALL_NETWORK, 2),
        (SMALL_NETWORK, 4),
        pytest.param(SMALL, 2, marks=pytest.mark.slow),
        pytest.param(SMALL, 4, marks=pytest.mark.slow),
        pytest.param("resnet18", 2, marks=pytest.mark.slow),
        pytest.param("resnet18", 4, marks=pytest.mark.slow),
    ],
)
def test_world_size_changes_nothing_in_float64(runs, model, size):
    single, distributed = runs(1, model=model), runs(size, model=model)
    assert losses(distributed) == pytest.approx(losses(single), rel=1e-9)
    assert distance(weights(distributed), weights(single)) < 1e-9  # running statistics included
    assert distance(momentum(distributed), momentum(single)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_world_size_changes_only_rounding_in_float32(runs, size):
    """Rounding of 1e-7 grows tenfold every few steps in this model, at any world size."""
    single, distributed = runs(1, "fp32", "resnet18"), runs(size, "fp32", "resnet18")
    assert losses(distributed)[:8] == pytest.approx(losses(single)[:8], rel=1e-5)
    assert losses(distributed) == pytest.approx(losses(single), rel=1e-1)  # of noise images; how much depends on the CPU
    parameters = [k for k in weights(single) if not k.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    a, b = ({k: weights(run)[k] for k in parameters} for run in (distributed, single))
    assert overall_distance(a, b) < 1e-3


@pytest.mark.parametrize(
    "rule",
    [
        "no_synchronization",
        pytest.param("last_statistics", marks=pytest.mark.slow),
        pytest.param("own_statistics", marks=pytest.mark.slow),
        pytest.param("order_by_rank", marks=pytest.mark.slow),
    ],
)
def test_each_rule_is_needed(runs, rule):
    """With one rule broken, the comparison above fails, so it detects the error."""
    assert distance(weights(runs(2, model=SMALL_NETWORK, sabotage=rule)), weights(runs(1, model=SMALL_NETWORK))) > 1e-6


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        (SMALL_NETWORK, STEPS),
        (SMALL, 3),
        pytest.param(SMALL, STEPS, marks=pytest.mark.slow),
        pytest.param("resnet18", STEPS, marks=pytest.mark.slow),
    ],
)
def test_a_plain_loop_gives_the_same_losses_and_weights(runs, model, steps):
    run = runs(1, model=model, steps=steps)
    expected_losses, replicas = reference.train(steps, model)
    assert losses(run) == pytest.approx(expected_losses, rel=1e-6)
    assert distance(weights(run), reference.mean_state(replicas, steps)) < 1e-10


NOISE = ("--data.name", "synthetic", "--data.samples", "96", "--data.classes", "10")


@pytest.fixture
def two_steps(ranks):
    """two_steps(name, size, *settings): trains two steps with ``size`` processes; returns the folder."""

    def run(name: str, size: int, *settings: str) -> Path:
        path = ranks.cwd / "runs" / f"{name}-{size}"
        if not path.exists():
            (ranks.cwd / "recipe.yaml").write_text(reference.RECIPE.format(precision="fp64", model=SMALL))
            ranks(size).run("train", "recipe.yaml", *NOISE, "--name", path.name, *settings, "--max-steps", "2")
        return path

    return run


SIZES = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
AUGMENTED = (
    *("--augment.policy", "randaugment-timm", "--augment.interpolation", "bicubic", "--augment.erasing", "0.25"),
    *("--augment.mixup", "0.2", "--augment.cutmix", "1", "--loss.name", "bce", "--loss.bce-threshold", "0.2"),
    *("--model.blurpool", "--data.val-mirror", "--average.name", "ema", "--average.decay", "0.9"),
    *("--data.sampling-weights", "9", "1", "1", "1", "1", "1", "1", "1", "1", "0"),
)


@SIZES
def test_augmentation_mixing_bce_averages_and_weighted_sampling_do_not_depend_on_the_world_size(two_steps, size):
    alone, both = (two_steps("augmented", n, *AUGMENTED) for n in (1, size))
    assert losses(both) == pytest.approx(losses(alone), rel=1e-6)
    assert distance(weights(both), weights(alone)) < 1e-8
    assert distance(average_of(both), average_of(alone)) < 1e-8
    assert not identical(average_of(alone), weights(alone))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", ["rmsprop", "lars", "lamb", "nadamw", "lion"])
def test_other_optimizers_do_not_depend_on_the_world_size_either(two_steps, optimizer, size):
    # Small: all but LARS start with steps whose size is the learning rate.
    settings = ("--optimizer.name", optimizer, "--optimizer.lr", "0.0001")
    alone, both = (two_steps(optimizer, n, *settings) for n in (1, size))
    assert losses(both) == pytest.approx(losses(alone), rel=1e-6)
    assert distance(weights(both), weights(alone)) < 1e-8
