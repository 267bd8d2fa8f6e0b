"""Evaluation: of images together with their mirror images, and what it costs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from worldsize.config.recipe import Data
from worldsize.data.images.crops import CenterCrop
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.loader import Loader
from worldsize.data.samples import ArraySamples
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World
from worldsize.training.evaluation import Result, evaluate
from worldsize.training.precision import Precision

SIZE, CPU = 8, torch.device("cpu")
WORLD = World(RankInfo("none", 0, 1, 0, 1), CPU, None, 1)


def result(images: np.ndarray, model: nn.Module, mirror: bool, precision: str = "fp64") -> Result | None:
    labels = (np.arange(len(images)) % 6).astype(np.int32)
    samples = ArraySamples("noise", images, labels, tuple("abcdef"))
    loader = Loader(samples, CenterCrop(SIZE, False, SIZE), seed=1, workers=1, prefetch=1, pin=False)
    try:
        number_format = Precision(precision, CPU)
        normalise = Normalise(Data(), CPU, number_format.weights)
        return evaluate(model, loader, normalise, number_format, WORLD, 16, mirror=mirror)
    finally:
        loader.close()


def test_mirror_images_have_the_same_say():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 6)).double()
    images = np.random.default_rng(0).integers(0, 256, (50, SIZE, SIZE, 3), dtype=np.uint8)
    mirrored = np.ascontiguousarray(images[:, :, ::-1])
    assert result(images, model, mirror=False) != result(mirrored, model, mirror=False)
    both = result(images, model, mirror=True)
    assert both == result(mirrored, model, mirror=True)
    pixels = Normalise(Data(), CPU, torch.float64)(torch.from_numpy(np.concatenate([images, mirrored])))
    logits = model(pixels).view(2, 50, 6).mean(0)
    assert both is not None and both.top1 == (logits.argmax(1) == torch.arange(50) % 6).double().mean().item()


def test_of_equal_logits_that_of_the_smaller_class_number_is_higher():
    """As in argmax, so that the accuracy is that of the predictions in ``eval --details``."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 6)).double()
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    found = result(np.zeros((50, SIZE, SIZE, 3), np.uint8), model, mirror=False)
    assert found is not None and (found.top1, found.top5) == (9 / 50, 42 / 50)


class Casts(TorchDispatchMode):
    """Counts casts by the shape of what is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy) and result.dtype is torch.bfloat16:
            self.found[tuple(result.shape)] += 1
        return result


def test_weights_are_cast_once_in_an_evaluation_and_again_in_the_next_one():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 6))
    images = np.zeros((50, SIZE, SIZE, 3), np.uint8)
    weight = tuple(model[1].weight.shape)
    for evaluations in (1, 2):
        with Casts() as casts:
            for _ in range(evaluations):
                result(images, model, mirror=False, precision="bf16")
        assert casts.found[weight] == evaluations and casts.found[16, 3 * SIZE * SIZE] == 3 * evaluations
