"""The losses and margins of training samples: against formulas, and the same at every world size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

from paths import SMALL_NETWORK
from processes import newest
from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.training.margins import SCALE, Answers, Margins
from worldsize.training.objective import Objective, margin
from worldsize.training.precision import Precision

CPU = torch.device("cpu")
ALONE = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)


@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
def test_the_margin_is_the_label_minus_the_best_other(seed: int, classes: int):
    dice = np.random.default_rng(seed)
    logits, labels = dice.normal(size=(5, classes)), dice.integers(classes, size=5)
    expected = [row[label] - max(np.delete(row, label)) for row, label in zip(logits, labels, strict=True)]
    np.testing.assert_array_equal(margin(torch.from_numpy(logits), torch.from_numpy(labels)).numpy(), expected)


def test_the_values_of_a_forward_pass():
    recipe = Recipe()
    objective = Objective(torch.nn.Identity(), Normalise(recipe.data, CPU, torch.float32), Precision("fp32", CPU), recipe)
    logits, labels = torch.tensor([[2.0, 1.0, -1.0], [0.5, 3.0, 1.0]]), torch.tensor([0, 2])
    losses = functional.cross_entropy(logits, labels, reduction="none")
    values = objective.values(losses, logits, labels, None)
    torch.testing.assert_close(
        values, torch.stack([losses, torch.tensor([1.0, 0.0]), torch.tensor([1.0, -2.0])], 1).double()
    )


def noted(visits: list[tuple[int, float, float]], sizes: list[int]) -> dict[str, torch.Tensor]:
    """What `Margins` sums of these visits (sample, loss, margin), merged after each of the ``sizes``."""
    margins, at = Margins(8), 0
    for size in sizes:
        part, at = visits[at : at + size], at + size
        values = torch.tensor([(loss, 0.0, its) for _, loss, its in part], dtype=torch.float64).reshape(-1, 3)
        margins.add([Answers(np.array([i for i, _, _ in part], np.int64), values, mixed=False)])
        margins.merge(ALONE)
    return margins.tensors()


VISITS = st.lists(st.tuples(st.integers(0, 7), st.floats(0, 30), st.floats(-50, 50)), min_size=4, max_size=40)


@given(VISITS, st.randoms(use_true_random=False))
def test_sums_do_not_depend_on_the_order_of_visits(visits: list[tuple[int, float, float]], dice):
    shuffled = dice.sample(visits, len(visits))
    one, other = noted(visits, [len(visits)]), noted(shuffled, [1, 2, len(visits) - 3])
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["visits"].tolist() == np.bincount([i for i, _, _ in visits], minlength=8).tolist()
    exact = np.bincount([i for i, _, _ in visits], [m for _, _, m in visits], minlength=8)
    assert np.abs(one["margin"].numpy() / SCALE - exact).max() <= 0.5 / SCALE * len(visits)


def test_mixed_images_are_not_counted():
    margins = Margins(4)
    margins.add([Answers(np.array([1, 2]), torch.ones(2, 3, dtype=torch.float64), mixed=True)])
    margins.add([Answers(np.array([2, 3]), torch.ones(2, 3, dtype=torch.float64), mixed=False)])
    margins.merge(ALONE)
    assert margins.tensors()["visits"].tolist() == [0, 0, 1, 1]


def test_an_image_that_is_drawn_often_does_not_overflow():
    margins = Margins(2, wide=True)
    values = torch.full((40_000, 3), -900.0, dtype=torch.float64)
    margins.add([Answers(np.ones(40_000, np.int64), values, mixed=False)])
    margins.merge(ALONE)
    saved = margins.tensors()
    margins.load(saved)
    margins.add([Answers(np.ones(1, np.int64), values[:1], mixed=False)])
    margins.merge(ALONE)
    assert margins.tensors()["visits"].tolist() == [0, 40_001]
    assert margins.tensors()["margin"].tolist() == margins.tensors()["loss"].tolist() == [0, -900 * SCALE * 40_001]


SMALL = (
    *("digits", "--model.name", SMALL_NETWORK, "--global-batch", "16", "--micro-batch", "4", "--precision", "fp32"),
    *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--data.val-resize-size", "16"),
    *("--parallel.strategy", "bitwise", "--augment.repeats", "3", "--data.sampling", "balanced"),
)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_world_size_has_the_same_sums_also_after_an_interruption(ranks, size):
    runs = ranks.cwd / "runs"
    if not (runs / "one").exists():
        ranks(1).run("train", *SMALL, "--name", "one", "--stop-after", "4", code=75)
    ranks(size).run("train", *SMALL, "--name", f"{size}", "--stop-after", "2", code=75)
    ranks(size).run("train", "--resume", runs / f"{size}", "--stop-after", "4", code=75)
    one, other = (load_file(newest(run) / "samples.safetensors") for run in (runs / "one", runs / f"{size}"))
    assert one["visits"].sum() == 4 * 16
    assert one["visits"].max() == 3  # repeats of an image are on different ranks
    assert (one["margin"] != 0).sum() == (one["visits"] > 0).sum()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_without_margins_there_is_no_file(ranks):
    ranks(2).run("train", *SMALL, "--track.no-margins", "--name", "none", "--stop-after", "1", code=75)
    assert not (newest(ranks.cwd / "runs" / "none") / "samples.safetensors").exists()
