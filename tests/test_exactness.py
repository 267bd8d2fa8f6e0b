"""The central guarantee: every world size computes the same, correct numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import reference
from processes import distance, losses, momentum, overall_distance, weights


@pytest.fixture(scope="module")
def runs(ranks):
    """runs(size, precision, model) trains once and returns the run folder."""
    cwd = ranks.cwd

    def run(size: int, precision: str = "fp64", model: str = "resnet18", sabotage: str | None = None) -> Path:
        name = f"{model}-{precision}-{size}-{sabotage}"
        if not (cwd / "runs" / name).exists():
            (cwd / f"{name}.yaml").write_text(reference.RECIPE.format(precision=precision, model=model))
            ranks(size, sabotage=sabotage).run("train", f"{name}.yaml", "--name", name)
        return cwd / "runs" / name

    return run


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("resnet18", 2),
        pytest.param("resnet18", 4, marks=pytest.mark.slow),
        pytest.param("mobilenet_v3_small", 2, marks=pytest.mark.slow),
    ],
)
def test_world_size_changes_nothing_in_float64(runs, model, size):
    single, distributed = runs(1, model=model), runs(size, model=model)
    assert losses(distributed) == pytest.approx(losses(single), rel=1e-6)  # metrics.jsonl stores seven digits
    assert distance(weights(distributed), weights(single)) < 1e-9  # running statistics included
    assert distance(momentum(distributed), momentum(single)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_world_size_changes_only_rounding_in_float32(runs, size):
    """Rounding of 1e-7 grows tenfold every few steps in this model, at any world size."""
    single, distributed = runs(1, "fp32"), runs(size, "fp32")
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
    assert distance(weights(runs(2, sabotage=rule)), weights(runs(1))) > 1e-6


def test_a_plain_loop_gives_the_same_losses_and_weights(runs):
    run = runs(1)
    expected_losses, replicas = reference.train(20)
    assert losses(run) == pytest.approx(expected_losses, rel=1e-6)
    assert distance(weights(run), reference.mean_state(replicas, 20)) < 1e-10
