"""Mixup, CutMix and the losses: equal to torchvision's and timm's, and independent of the world size."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torchvision.transforms import v2

from worldsize.config.recipe import Augment, Recipe
from worldsize.data.augmentation.mixing import WIDTH, Mixing, cutmix
from worldsize.data.images.crops import CenterCrop
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.loader import Loader, Treatment
from worldsize.data.samples import ArraySamples
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.training.losses import Criterion
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision

MICRO, CLASSES, SIZE = 4, 5, 16
CPU = torch.device("cpu")
torch.manual_seed(0)
PIXELS = torch.randint(0, 256, (MICRO, SIZE, SIZE, 3), dtype=torch.uint8)
LABELS = torch.tensor([0, 3, 1, 3])


class Seen(nn.Module):
    """A network that keeps its images and returns fixed logits."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.logits = torch.randn(samples, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images = images
        return self.logits


def objective(samples: int = MICRO, **settings) -> Objective:
    recipe = Recipe.model_validate({"global_batch": 8, "micro_batch": MICRO, **settings})
    precision = Precision("fp32", CPU)
    return Objective(Seen(samples), Normalise(recipe.data, CPU, torch.float32), precision, recipe)


def theirs(transform: v2.Transform, weight: float, *places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torchvision's images and targets with this draw from the Beta distribution, and these places of the box."""
    images = objective().normalise(PIXELS)
    integers = [torch.tensor([place]) for place in places]
    with (
        mock.patch.object(transform._dist, "sample", return_value=torch.tensor(weight, dtype=torch.float64)),
        mock.patch.object(torch, "randint", side_effect=integers),
    ):
        return transform(images, LABELS)


def soft_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -(targets * logits.log_softmax(1)).sum(1)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.75, 1.0])
def test_mixup_is_torchvisions(weight):
    ours = objective()
    losses, _ = ours(PIXELS, LABELS, torch.tensor([[weight, weight, 0, 0, 0, 0]] * MICRO))
    images, targets = theirs(v2.MixUp(num_classes=CLASSES), weight)
    torch.testing.assert_close(ours.network.images, images, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses, soft_cross_entropy(ours.network.logits, targets), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.66, 0.99, 1.0])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (7, 3), (15, 9), (15, 15)])
def test_cutmix_is_torchvisions(weight, x, y):
    ours = objective()
    row = cutmix(weight, (y + 0.5) / SIZE, (x + 0.5) / SIZE, SIZE)
    losses, _ = ours(PIXELS, LABELS, torch.tensor([row] * MICRO))
    images, targets = theirs(v2.CutMix(num_classes=CLASSES), weight, x, y)
    assert torch.equal(ours.network.images, images)
    torch.testing.assert_close(losses, soft_cross_entropy(ours.network.logits, targets), rtol=1e-5, atol=1e-6)


def test_partners_are_within_a_micro_batch():
    ours = objective(2 * MICRO)
    twice, labels = torch.cat([PIXELS, 255 - PIXELS]), torch.cat([LABELS, LABELS])
    ours(twice, labels, torch.tensor([[0.0, 0.0, 0, 0, 0, 0]] * 2 * MICRO))  # every image is its partner
    expected = ours.normalise(torch.cat([PIXELS.roll(1, 0), 255 - PIXELS.roll(1, 0)]))
    assert torch.equal(ours.network.images, expected)


def test_a_prediction_counts_as_correct_if_it_is_the_larger_part():
    mix = torch.tensor([[weight, 1.0, 0, 0, 0, 0] for weight in (0.4, 0.6, 0.5, 0.0)])
    assert objective().likeliest(LABELS, mix).tolist() == [3, 3, 1, 1]
    assert objective().likeliest(LABELS, None) is LABELS


def test_without_mixing_the_loss_is_cross_entropy_bit_for_bit():
    ours = objective(label_smoothing=0.1)
    losses, logits = ours(PIXELS, LABELS)
    assert torch.equal(losses, functional.cross_entropy(logits, LABELS, reduction="none", label_smoothing=0.1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_bce_is_timms(smoothing, reduction):
    timm = pytest.importorskip("timm.loss", reason="timm is not installed")
    recipe = Recipe.model_validate({"label_smoothing": smoothing, "loss": {"name": "bce", "bce_reduction": reduction}})
    logits = torch.randn(MICRO, CLASSES)
    expected = timm.BinaryCrossEntropy(smoothing=smoothing, sum_classes=reduction == "sum")(logits, LABELS)
    torch.testing.assert_close(Criterion(recipe)(logits, LABELS).mean(), expected)


@pytest.mark.parametrize("threshold", [0.0, 0.2, None])
def test_bce_of_mixed_targets_is_timms(threshold):
    timm = pytest.importorskip("timm.loss", reason="timm is not installed")
    recipe = Recipe.model_validate({"loss": {"name": "bce", "bce_threshold": threshold}})
    logits, others, weights = torch.randn(MICRO, CLASSES), LABELS.roll(1), torch.tensor([[0.9], [0.1], [0.5], [1.0]])
    targets = weights * functional.one_hot(LABELS, CLASSES) + (1 - weights) * functional.one_hot(others, CLASSES)
    expected = timm.BinaryCrossEntropy(smoothing=0.0, target_threshold=threshold)(logits, targets)
    torch.testing.assert_close(Criterion(recipe)(logits, LABELS, others, weights).mean(), expected)


def test_smoothing_follows_the_threshold():
    recipe = Recipe.model_validate({"label_smoothing": 0.1, "loss": {"name": "bce", "bce_threshold": 0.0}})
    logits = torch.randn(MICRO, CLASSES)
    targets = functional.one_hot(LABELS, CLASSES) * 0.9 + 0.1 / CLASSES
    expected = functional.binary_cross_entropy_with_logits(logits, targets)
    torch.testing.assert_close(Criterion(recipe)(logits, LABELS).mean(), expected)


def test_the_draws_have_the_distributions_of_the_settings():
    size = 64
    mixing = Mixing(Augment(mixup=0.4, cutmix=1.0, cutmix_share=0.25, mix_chance=0.8), 3, 1, size)
    mixes = mixing(0, 0, 4000)
    assert mixes.shape == (4000, WIDTH)
    boxes, mixed = mixes[:, 4] > 0, mixes[:, 1] < 1
    assert abs(boxes.mean() - 0.2) < 0.03
    assert abs(mixed.mean() - 0.6) < 0.03
    weights = mixes[mixed, 0]
    assert abs(weights.mean() - 0.5) < 0.03
    assert abs(weights.var() - 1 / (4 * (2 * 0.4 + 1))) < 0.01  # of Beta(0.4, 0.4)
    areas = (mixes[boxes, 4] - mixes[boxes, 2]) * (mixes[boxes, 5] - mixes[boxes, 3]) / size**2
    assert np.allclose(mixes[boxes, 0], 1 - areas, atol=1e-6)
    assert Mixing(Augment(cutmix=1.0), 3, 1, size)(0, 0, 50)[:, 1].tolist() == [1.0] * 50
    assert Mixing(Augment(mixup=1.0), 3, 1, size)(0, 0, 50)[:, 4].tolist() == [0.0] * 50


@pytest.mark.parametrize(("world", "groups"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_a_micro_batch_is_mixed_in_the_same_way_at_every_world_size(world, groups):
    noise = np.random.default_rng(0).integers(0, 256, (70, SIZE, SIZE, 3), dtype=np.uint8)
    samples = ArraySamples("noise", noise, np.zeros(70, np.int32), ("a",))
    mixing = Mixing(Augment(mixup=0.2, cutmix=1.0), 9, MICRO, SIZE)
    treatment = Treatment(CenterCrop(SIZE, False, SIZE), mixing=mixing)
    options = {"seed": 9, "workers": 1, "prefetch": 1, "pin": False}
    loader = Loader(samples, treatment.crop, **options, treatment=lambda epoch: treatment)

    def steps(plan: BatchPlan, first_step: int = 0) -> torch.Tensor:
        """The mixes of the steps' samples, (steps, global batch, 6)."""
        ranks = [list(loader.training(plan, rank, 2, first_step)) for rank in range(plan.world_size)]
        passes = plan.accumulation
        count = len(ranks[0]) // passes
        rows = [rank[step * passes + i].mix for step in range(count) for rank in ranks for i in range(passes)]
        return torch.cat(rows).reshape(count, plan.global_batch, WIDTH)

    try:
        alone = steps(BatchPlan(16, MICRO, 1))
        assert len(alone.unique(dim=1)) == 4  # steps
        assert len(alone.reshape(-1, WIDTH).unique(dim=0)) == 16  # micro-batches
        assert torch.equal(steps(BatchPlan(16, MICRO, world, groups=groups)), alone)
        assert torch.equal(steps(BatchPlan(16, MICRO, world, groups=groups), first_step=3), alone[3:])
        assert [batch.mix for batch in loader.evaluation(0, 1, 32)] == [None] * 3
    finally:
        loader.close()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="set micro_batch to at least 2"):
        Recipe.model_validate({"global_batch": 8, "micro_batch": 1, "augment": {"mixup": 0.2}})
    with pytest.raises(ValueError, match="larger than the images"):
        Recipe.model_validate({"augment": {"cutout": 300}})
    with pytest.raises(ValueError, match="0 to 10"):
        Recipe.model_validate({"augment": {"policy": "randaugment-timm", "magnitude": 11}})
    with pytest.raises(ValueError, match="31 magnitudes"):
        Recipe.model_validate({"augment": {"policy": "randaugment", "magnitude": 7.5}})
