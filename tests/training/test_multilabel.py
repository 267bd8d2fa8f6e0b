"""Training on images with several labels: the loss, the metrics, and equal numbers at every world size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import nn
from torch.nn import functional

from paths import SMALL_NETWORK
from processes import distance, identical, losses, momentum, records, weights
from worldsize import checkpoint
from worldsize.config.recipe import Data, Recipe
from worldsize.config.recipe_files import validate
from worldsize.data.images.crops import CenterCrop
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.loader import Loader
from worldsize.data.samples import ArraySamples
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.training.evaluation import Result, evaluate
from worldsize.training.losses import Criterion
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision
from worldsize.training.progress import Progress

CPU, CLASSES, N = torch.device("cpu"), 5, 12
GENERATOR = torch.Generator().manual_seed(1)
LOGITS = torch.randn(N, CLASSES, generator=GENERATOR, dtype=torch.float64)
LABELS = (torch.rand(N, CLASSES, generator=GENERATOR) < 0.4).to(torch.uint8)
FACTORS = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def recipe(**settings) -> Recipe:
    loss = {"name": "bce"} | settings.pop("loss", {})
    return Recipe.model_validate({"data": {"name": "multilabel"}, "loss": loss, **settings})


@pytest.mark.parametrize("factors", [None, FACTORS])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_torchs(reduction, factors):
    ours = Criterion(recipe(loss={"bce_reduction": reduction}), factors)(LOGITS, LABELS)
    theirs = functional.binary_cross_entropy_with_logits(LOGITS, LABELS.double(), factors, reduction="none")
    torch.testing.assert_close(ours, theirs.sum(1) if reduction == "sum" else theirs.mean(1), rtol=0, atol=0)


def test_one_label_gives_the_same_loss_in_both_forms():
    labels = torch.arange(N) % CLASSES
    mixed = labels.roll(1), torch.full((N, 1), 0.3)
    hot = [functional.one_hot(part, CLASSES).to(torch.uint8) for part in (labels, mixed[0])]
    for settings in ({}, {"label_smoothing": 0.1}, {"loss": {"bce_threshold": 0.2}}):
        criterion = Criterion(recipe(**settings))
        assert torch.equal(criterion(LOGITS, labels), criterion(LOGITS, hot[0]))
        assert torch.equal(criterion(LOGITS, labels, *mixed), criterion(LOGITS, hot[0], hot[1], mixed[1]))


class Fixed(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return LOGITS


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.7])
def test_mixed_images_have_mixed_targets(weight):
    settings = recipe(global_batch=N, micro_batch=N // 2, augment={"mixup": 0.2})
    objective = Objective(Fixed(), Normalise(Data(), CPU, torch.float64), Precision("fp64", CPU), settings)
    mix = torch.tensor([[weight, weight, 0, 0, 0, 0]] * N)
    found, _ = objective(torch.zeros(N, 4, 4, 3, dtype=torch.uint8), LABELS, mix)
    partners = torch.cat([half.roll(1, 0) for half in LABELS.double().chunk(2)])
    targets = LABELS * mix[:, :1].double() + partners * (1 - mix[:, :1].double())
    torch.testing.assert_close(found, functional.binary_cross_entropy_with_logits(LOGITS, targets, reduction="none").mean(1))
    counted = LABELS if weight >= 0.5 else partners
    expected = counted[torch.arange(N), LOGITS.argmax(1)] > 0
    assert torch.equal(objective.correct(LOGITS, LABELS, mix), expected)
    assert torch.equal(objective.correct(LOGITS, LABELS, None), LABELS[torch.arange(N), LOGITS.argmax(1)] > 0)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "cross_entropy"}, "cross_entropy is for one label per image: set loss.name to bce"),
        ({"name": "bce", "balanced": True}, "leave out loss.balanced"),
        ({"name": "bce", "teacher": "run"}, "leave out loss.teacher"),
    ],
)
def test_what_needs_one_label_is_refused(loss, message):
    with pytest.raises(UserError, match=message):
        validate({"data": {"name": "multilabel"}, "loss": loss}, "here")


def test_evaluation_by_its_definition():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, CLASSES)).double()
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (50, 8, 8, 3), dtype=np.uint8)
    labels = (random.random((50, CLASSES)) < [0.1, 0.3, 0.5, 0.9, 0.0]).astype(np.uint8)
    samples = ArraySamples("noise", images, labels, tuple("abcde"))
    loader = Loader(samples, CenterCrop(8, False, 8), seed=1, workers=1, prefetch=1, pin=False)
    normalise, precision = Normalise(Data(), CPU, torch.float64), Precision("fp64", CPU)
    found = evaluate(model, loader, normalise, precision, World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1), 16)
    loader.close()
    logits, targets = model(normalise(torch.from_numpy(images))).detach(), torch.from_numpy(labels)
    theirs = average_precision_score(labels[:, :4], logits[:, :4].numpy())  # class e has no image
    assert found is not None
    assert found.map == found.score == pytest.approx(theirs)
    assert found.loss == pytest.approx(float(functional.binary_cross_entropy_with_logits(logits, targets.double())))
    assert found.top1 == pytest.approx(float((targets[torch.arange(50), logits.argmax(1)] > 0).double().mean()))
    assert found.top5 == float(targets.any(1).double().mean())
    assert str(found).startswith(f"mAP {theirs:.2%}, F1 {found.f1:.2%}, top-1 ")


SIDE = 32
SETTINGS = (
    *("--data.name", "multilabel", "--data.root", "images", "--loss.name", "bce", "--epochs", "2", "--global-batch", "16"),
    *("--micro-batch", "4", "--precision", "fp64", "--model.name", SMALL_NETWORK, "--schedule.warmup-epochs", "0"),
    *("--optimizer.lr", "0.002", "--data.train-crop", "none", "--label-smoothing", "0"),
    *("--augment.mixup", "0.2", "--augment.cutmix", "1", "--augment.mix-chance", "0.5"),
)


def generate(root: Path) -> None:
    """Images whose quarters are bright for their labels, some without labels, in a table per split."""
    random = np.random.default_rng(5)
    for split, count in (("train", 32), ("val", 21)):
        lines = ["image,labels"]
        (root / split).mkdir(parents=True)
        for i in range(count):
            quarters = random.random(4) < 0.4
            bright = np.kron(quarters.reshape(2, 2), np.ones((SIDE // 2, SIDE // 2)))[..., None] * 120
            pixels = (bright + random.integers(0, 136, (SIDE, SIDE, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(root / split / f"{i}.png")
            lines.append(f"{split}/{i}.png,{';'.join(f'q{q}' for q in np.flatnonzero(quarters))}")
        (root / f"{split}.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def train(ranks):
    """train(name, size, ...) trains, unless the run exists, and returns its folder and output."""
    generate(ranks.cwd / "images")
    outputs: dict[str, str] = {}

    def run(name: str, size: int, *more: str) -> tuple[Path, str]:
        if name not in outputs:
            outputs[name] = ranks(size).run("train", "digits", *SETTINGS, "--name", name, *more)
        return ranks.cwd / "runs" / name, outputs[name]

    return run


NUMBERS = ("train_loss", "train_top1", "val_loss", "val_top1", "val_top5", "val_map", "val_f1", "val_samples")


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def numbers(run: Path) -> list[list[float]]:
    return [[record[name] for name in NUMBERS] for record in records(run, "epoch")]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_world_size_has_the_same_numbers(train, size):
    one, more = train("one", 1)[0], train(f"several{size}", size)[0]
    assert distance(weights(more), weights(one)) < 1e-9
    assert np.allclose(numbers(more), numbers(one), rtol=1e-6)
    assert result(more)["map"] == result(one)["map"]  # all bits: it depends only on the order of the scores


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_eval_reports_the_same_bits_as_the_run(train, ranks, size):
    run, _ = train("one", 1)
    evaluated = ranks(size).run("eval", "runs/one")
    found = result(run)
    state = checkpoint.read(checkpoint.find(run)).state
    assert state["evaluation"]["map"] == found["map"]
    assert f"mAP {found['map']:.2%}, F1 {found['f1']:.2%}, top-1 {found['top1']:.2%}" in evaluated
    assert "on 21 images" in evaluated


def test_the_map_decides_which_checkpoint_is_the_best(train):
    run, output = train("one", 1)
    epochs = records(run, "epoch")
    best = max(epochs, key=lambda record: record["val_map"])
    found = result(run)
    assert (found["best_epoch"], found["best_map"]) == (best["epoch"], pytest.approx(best["val_map"], rel=1e-6))
    kept = {checkpoint.step_of(path): checkpoint.score_of(path) for path in checkpoint.list_checkpoints(run / "checkpoints")}
    assert kept[best["step"]] == found["best_map"]
    assert "val mAP" in output
    assert re.search(rf"mAP {found['map']:.2%}, F1 .* best {found['best_map']:.2%} after epoch {best['epoch']}", output)


def test_the_best_is_the_one_with_the_highest_map():
    progress = Progress()
    assert progress.evaluated(Result(1.0, 0.9, 0.9, 10, 0, 0.5, 0.5))
    assert not progress.evaluated(Result(1.0, 1.0, 1.0, 10, 0, 0.5, 0.9))
    assert progress.evaluated(Result(1.0, 0.1, 0.9, 10, 0, 0.6, 0.5))
    assert (progress.best_top1, progress.best_map) == (0.1, 0.6)


def test_checkpoints_of_older_versions_have_no_map(tmp_path):
    evaluation = {"loss": 1.0, "top1": 0.5, "top5": 0.9, "samples": 10, "broken": 0}
    (tmp_path / "state.json").write_text(json.dumps({"evaluation": evaluation}))
    assert checkpoint.score_of(tmp_path) == Result(**evaluation).score == 0.5
    progress = Progress.from_dict({"best_top1": 0.5, "evaluation": evaluation})
    assert not progress.evaluated(Result(1.0, 0.4, 0.9, 10, 0))
    assert progress.evaluated(Result(1.0, 0.6, 0.9, 10, 0))


@pytest.mark.parametrize("sizes", [(1, 1), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same_run(train, ranks, sizes):
    first, then = sizes
    name = f"stopped{first}{then}"
    ranks(first).run("train", "digits", *SETTINGS, "--name", name, "--stop-after", "3", code=75)
    ranks(then).run("train", "--resume", f"runs/{name}")
    run, one = ranks.cwd / "runs" / name, train("one", 1)[0]
    if sizes == (1, 1):
        assert identical(weights(run), weights(one))
        assert identical(momentum(run), momentum(one))
        assert losses(run) == losses(one)
        assert numbers(run) == numbers(one)
    assert np.allclose(numbers(run), numbers(one), rtol=1e-6)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--parallel.strategy", strategy), marks=pytest.mark.slow)
        for strategy in ("bitwise", "adasum", "localsgd", "async")
    ],
)
def test_other_strategies(train, more):
    run, _ = train(more[-1], 2, *more)
    assert 0 < result(run)["map"] <= 1


@pytest.mark.slow
def test_replay_shows_several_labels(train, ranks):
    train("one", 1)
    ranks(1).run("replay", "runs/one", "--step", "2", "--from-start", "--out", "page.html")
    assert re.search(r"<b><bdi>(q\d, q\d|no label)<", (ranks.cwd / "page.html").read_text())
