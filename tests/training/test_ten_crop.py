"""Evaluation of ten crops of each image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import functional

from packing import encode
from paths import SMALL_NETWORK
from processes import records
from worldsize.config.recipe import Data
from worldsize.data import open_dataset
from worldsize.data.images.crops import evaluation_crop, five_crops
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.loader import Loader
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.training.evaluation import evaluate
from worldsize.training.precision import Precision

CPU = torch.device("cpu")
WORLD = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)
SIZES = {"val_resize_size": 32, "val_crop_size": 24}


@pytest.mark.parametrize("shape", [(41, 67), (67, 41), (20, 33), (40, 40)])
def test_the_crops_are_torchvisions(shape):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
    expected = functional.five_crop(functional.resize(image, 32), 24)
    crops = five_crops(Data(**SIZES, val_ten_crop=True))
    for crop, part in zip(crops, expected, strict=True):
        np.testing.assert_array_equal(crop.one(image, np.zeros(crop.draws)), np.asarray(part))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes with JPEGs of different shapes."""
    root = tmp_path_factory.mktemp("ten") / "root"
    dice = np.random.default_rng(0)
    for number in range(24):
        split, name = ("train", "val")[number % 2], ("cat", "dog")[number // 2 % 2]
        (root / split / name).mkdir(parents=True, exist_ok=True)
        height, width = dice.integers(36, 60, 2)
        pixels = np.kron(dice.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8), np.ones((4, 4, 1), np.uint8))
        (root / split / name / f"{number}.jpg").write_bytes(encode(Image.fromarray(pixels), "JPEG"))
    return root


def test_the_logits_of_ten_crops_of_files_are_averaged(folder, tmp_path):
    settings = Data(name="folder", root=folder, val_ten_crop=True, **SIZES)
    samples = open_dataset(settings, tmp_path).val
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 2)).double()
    normalise = Normalise(settings, CPU, torch.float64)
    loader = Loader(samples, evaluation_crop(settings), seed=1, workers=2, prefetch=2, pin=False)
    try:
        ours = evaluate(model, loader, normalise, Precision("fp64", CPU), WORLD, 4, crops=five_crops(settings))
    finally:
        loader.close()
    losses = []
    for index, label in enumerate(samples.labels):
        with Image.open(folder / "val" / samples.name(index)) as image:
            five = functional.five_crop(functional.resize(image.convert("RGB"), 32), 24)
        crops = [np.asarray(crop) for crop in (*five, *map(functional.hflip, five))]
        logits = model(normalise(torch.from_numpy(np.stack(crops)))).mean(0)
        losses.append(nn.functional.cross_entropy(logits, torch.tensor(int(label))).item())
    assert ours is not None and ours.loss == pytest.approx(np.mean(losses), rel=1e-12)


def test_eval_has_the_same_bits_at_every_world_size(ranks, folder):
    small = ("--model.name", SMALL_NETWORK, "--data.name", "folder", "--data.root", folder, "--precision", "fp64")
    sizes = ("--data.train-crop-size", "16", "--data.val-resize-size", "32", "--data.val-crop-size", "24")
    batch = ("--epochs", "1", "--global-batch", "8", "--micro-batch", "4", "--schedule.warmup-epochs", "0")
    ranks(1).run("train", "imagenet", *small, *sizes, *batch, "--name", "r")
    run = ranks.cwd / "runs" / "r"
    plain = ranks(1).run("eval", run)
    one, two = (ranks(size).run("eval", run, "--data.val-ten-crop") for size in (1, 2))
    assert one.splitlines()[-1] == two.splitlines()[-1] != plain.splitlines()[-1]
    ranks(1).run("train", "imagenet", *small, *sizes, *batch, "--data.val-ten-crop", "--name", "t")
    (epoch,) = records(ranks.cwd / "runs" / "t", "epoch")
    assert f"loss {epoch['val_loss']:.4f}" in one
