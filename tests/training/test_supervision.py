"""Class weights and distillation equal their definitions, and do not depend on the world size."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight, compute_sample_weight
from torch import nn
from torch.nn import functional

from paths import SMALL_NETWORK
from processes import distance, weights
from worldsize import parallel
from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.errors import UserError
from worldsize.training import supervision
from worldsize.training.losses import Criterion
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision

CPU = torch.device("cpu")
CLASSES, N = 5, 12
LOGITS = torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.arange(N) % CLASSES
FACTORS = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def test_balanced_weights_are_scikit_learns():
    labels = np.random.default_rng(0).integers(0, 3, 100).astype(np.int32)
    theirs = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert supervision.balanced(labels, 3).tolist() == pytest.approx(theirs.tolist())


def test_a_class_without_images_changes_no_balanced_weight():
    labels = np.array([0, 0, 0, 2], np.int32)
    weights = supervision.balanced(labels, 4).numpy()[labels]
    assert weights.tolist() == pytest.approx(compute_sample_weight("balanced", labels).tolist())
    assert weights.mean() == pytest.approx(1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_cross_entropy_is_torchs(smoothing):
    losses = Criterion(Recipe(label_smoothing=smoothing), FACTORS)(LOGITS, LABELS)
    theirs = nn.CrossEntropyLoss(FACTORS, reduction="sum", label_smoothing=smoothing)(LOGITS, LABELS)
    torch.testing.assert_close(losses.sum(), theirs)
    if not smoothing:
        plain = Criterion(Recipe())(LOGITS, LABELS)
        torch.testing.assert_close(losses, plain * FACTORS[LABELS])


def test_weighted_binary_cross_entropy_is_torchs():
    recipe = Recipe.model_validate({"loss": {"name": "bce", "bce_reduction": "sum"}})
    targets = functional.one_hot(LABELS, CLASSES).double()
    theirs = nn.BCEWithLogitsLoss(FACTORS, reduction="sum")(LOGITS, targets)
    torch.testing.assert_close(Criterion(recipe, FACTORS)(LOGITS, LABELS).sum(), theirs)


def test_distillation_is_hintons_loss():
    recipe = Recipe.model_validate({"loss": {"teacher_share": 0.3, "temperature": 4.0}, "label_smoothing": 0.1})
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, CLASSES)).double() for _ in range(2))
    normalise = Normalise(recipe.data, CPU, torch.float64)
    objective = Objective(student, normalise, Precision("fp64", CPU), recipe, teacher=teacher)
    pixels = torch.randint(0, 256, (N, 4, 4, 3), dtype=torch.uint8)
    losses, logits = objective(pixels, LABELS)
    images = normalise(pixels)
    soft = (teacher(images) / 4).softmax(1)
    # Cross-entropy with soft targets at the same temperature, times its square; minus the entropy of the targets.
    hinton = -(soft * ((student(images) / 4).softmax(1).log() - soft.log())).sum(1) * 16
    hard = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)(logits, LABELS)
    torch.testing.assert_close(losses, 0.7 * hard + 0.3 * hinton)
    losses.mean().backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert len(list(objective.parameters())) == 2  # the student's


def test_distillation_in_bf16_computes_the_divergence_in_fp32():
    """From probabilities in bf16, the small divergence of two similar networks can be negative."""
    recipe = Recipe.model_validate({"loss": {"teacher_share": 1.0, "temperature": 2.0}})
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, CLASSES)) for _ in range(2))
    teacher.load_state_dict({name: t + 0.02 * torch.randn_like(t) for name, t in student.state_dict().items()})
    normalise = Normalise(recipe.data, CPU, torch.float32)
    objective = Objective(student, normalise, Precision("bf16", CPU), recipe, teacher=teacher)
    pixels = torch.randint(0, 256, (N, 4, 4, 3), dtype=torch.uint8)
    losses, logits = objective(pixels, LABELS)
    with torch.autocast("cpu", torch.bfloat16):
        taught = teacher(normalise(pixels))
    assert logits.dtype == taught.dtype == torch.bfloat16
    soft, own = ((x.double() / 2).log_softmax(1) for x in (taught, logits))
    torch.testing.assert_close(losses.double(), (soft.exp() * (soft - own)).sum(1) * 4, rtol=1e-3, atol=1e-6)


SETTINGS = (
    *("--data.name", "synthetic", "--data.samples", "48", "--epochs", "1", "--global-batch", "16", "--micro-batch", "4"),
    *("--precision", "fp64", "--model.name", SMALL_NETWORK, "--schedule.warmup-epochs", "0", "--optimizer.lr", "0.0005"),
)
FOUR = ("--data.classes", "4")


@pytest.fixture(scope="module")
def teacher(ranks) -> Path:
    ranks(1).run("train", "digits", *SETTINGS, *FOUR, "--seed", "3", "--name", "teacher")
    return ranks.cwd / "runs" / "teacher"


@pytest.fixture(scope="module")
def taught(ranks, teacher):
    """taught(size) trains with the teacher; returns the weights."""

    def train(size: int) -> dict[str, torch.Tensor]:
        run = ranks.cwd / "runs" / f"taught{size}"
        more = (*FOUR, "--loss.teacher", "runs/teacher", "--loss.class-weights", "1", "0.5", "2", "1")
        if not run.exists():
            ranks(size).run("train", "digits", *SETTINGS, *more, "--name", run.name)
        return weights(run)

    return train


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_world_size_has_the_same_numbers(taught, size):
    assert distance(taught(size), taught(1)) < 1e-9


def test_the_teacher_matters(ranks, taught):
    ranks(1).run("train", "digits", *SETTINGS, *FOUR, "--name", "alone")
    assert distance(weights(ranks.cwd / "runs" / "alone"), taught(1)) > 1e-6


def test_a_run_does_not_resume_with_another_teacher(ranks, teacher):
    more = (*FOUR, "--loss.teacher", "runs/moving", "--name", "pupil")
    shutil.copytree(teacher, ranks.cwd / "runs" / "moving")
    ranks(1).run("train", "digits", *SETTINGS, *more, "--stop-after", "1", code=75)
    shutil.rmtree(ranks.cwd / "runs" / "moving")
    ranks(1).run("train", "digits", *SETTINGS, *FOUR, "--seed", "4", "--max-steps", "1", "--name", "moving")
    printed = ranks(1).run("train", "--resume", "runs/pupil", code=64)
    assert "the weights of loss.teacher: were " in printed and "pass --allow-changes" in printed
    shutil.rmtree(ranks.cwd / "runs" / "moving")
    shutil.copytree(teacher, ranks.cwd / "runs" / "moving")
    ranks(1).run("train", "--resume", "runs/pupil")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--loss.teacher", "runs/teacher", "--data.classes", "3"), "was trained on other classes"),
        (("--loss.teacher", "runs/teacher", *FOUR, "--data.mean", "0.1", "0.1", "0.1"), "another normalization"),
        (("--loss.teacher", "nowhere", *FOUR), "nowhere"),
        (("--loss.class-weights", "1", "2", *FOUR), "has 2 weights, but the dataset has 4 classes"),
        (("--loss.class-weights", "1", "2", "--loss.balanced", *FOUR), "leave out class_weights or balanced"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, teacher, more, message):
    assert message in ranks(1).run("train", "digits", *SETTINGS, *more, "--name", "refused", code=64)
    assert not (ranks.cwd / "runs" / "refused").exists()


def test_a_teacher_needs_a_process_for_each_device():
    recipe = Recipe.model_validate({"loss": {"teacher": "run"}, "parallel": {"strategy": "dataparallel"}})
    with pytest.raises(UserError, match="one process per device"):
        parallel.validate(recipe)
