"""The promise itself: the same numbers at every world size, and the right ones."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from processes import distance, losses, momentum, overall_distance, weights, world
from worldsize.data.crops import PadCrop
from worldsize.data.digits import open_dataset
from worldsize.data.order import permute
from worldsize.data.rng import Use, uniforms
from worldsize.recipe import Data

# Twenty steps with warmup, accumulation, shifts and mirrors; mobilenet has dropout besides BatchNorm. The small learning
# rate keeps the networks from amplifying rounding: at four times as much float64 differs by 1e-9 after 20 steps.
RECIPE = """
base: digits
epochs: 2
max_steps: 20
global_batch: 48
micro_batch: 12
precision: {precision}
data: {{flip: true, max_broken: 0}}
model: {{name: {model}}}
optimizer: {{lr: 0.0005, lr_reference_batch: 48}}
schedule: {{warmup_epochs: 0.5}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """runs(size, precision, model) trains once and gives the run folder."""
    cwd = tmp_path_factory.mktemp("exactness")

    def run(size: int, precision: str = "fp64", model: str = "resnet18", sabotage: str | None = None) -> Path:
        name = f"{model}-{precision}-{size}-{sabotage}"
        if not (cwd / "runs" / name).exists():
            (cwd / f"{name}.yaml").write_text(RECIPE.format(precision=precision, model=model))
            world(size, ["train", f"{name}.yaml", "--name", name], cwd, sabotage)
        return cwd / "runs" / name

    return run


@pytest.mark.parametrize(("model", "size"), [("resnet18", 2), ("resnet18", 4), ("mobilenet_v3_small", 2)])
def test_world_size_changes_nothing_in_float64(runs, model, size):
    alone, together = runs(1, model=model), runs(size, model=model)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-6)  # metrics.jsonl keeps seven digits
    assert distance(weights(together), weights(alone)) < 1e-9  # running statistics included
    assert distance(momentum(together), momentum(alone)) < 1e-9


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_world_size_changes_only_rounding_in_float32(runs, size):
    """Rounding of 1e-7 grows tenfold every few steps in this network, whoever computes it."""
    alone, together = runs(1, "fp32"), runs(size, "fp32")
    assert losses(together)[:8] == pytest.approx(losses(alone)[:8], rel=1e-5)
    assert losses(together) == pytest.approx(losses(alone), rel=2e-2)
    parameters = [k for k in weights(alone) if not k.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    a, b = ({k: weights(run)[k] for k in parameters} for run in (together, alone))
    assert overall_distance(a, b) < 1e-3


@pytest.mark.parametrize(
    "rule",
    [
        "no_synchronisation",
        "plain_momentum",
        pytest.param("own_statistics", marks=pytest.mark.slow),
        pytest.param("order_by_rank", marks=pytest.mark.slow),
    ],
)
def test_each_rule_is_needed(runs, rule):
    """With one rule broken the comparison above fails: it would notice."""
    assert distance(weights(runs(2, sabotage=rule)), weights(runs(1))) > 1e-6


def test_a_plain_loop_gives_the_same_losses_and_weights(runs):
    run = runs(1)
    expected_losses, expected = plain_loop()
    assert losses(run) == pytest.approx(expected_losses, rel=1e-6)
    assert distance(weights(run), expected) < 1e-10


def plain_loop() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The recipe above in plain PyTorch: one process, no part of worldsize but the order and the crops' draws."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    for block in model.modules():
        if isinstance(block, torchvision.models.resnet.BasicBlock):
            nn.init.zeros_(block.bn2.weight)
    model.double()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0  # the running buffers then hold the last batch's own statistics
    averages = [(torch.zeros(m.num_features).double(), torch.ones(m.num_features).double()) for m in norms]
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 5e-4}, {"params": others}], lr=0.1, momentum=0.9, nesterov=True
    )
    data = Data(name="digits", train_crop="pad", train_crop_size=32, val_resize_size=32, val_crop_size=32)
    train = open_dataset(data, Path()).train
    crop = PadCrop(32, flip=True, padding=4)
    n, per_epoch, total = len(train), len(train) // 48, 2 * (len(train) // 48)
    out = []
    for step in range(20):
        warmup = 0.5 * per_epoch
        progress = (step - warmup) / (total - warmup)
        lr = 0.0005 * (step / warmup if step < warmup else (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = lr
        epoch, first = step // per_epoch, step % per_epoch * 48
        statistics, total_loss = [], 0.0
        for micro in range(4):
            chosen = permute(0, epoch, np.arange(first + 12 * micro, first + 12 * micro + 12), n)
            pixels = crop.batch(train.pixels[chosen], uniforms(0, Use.AUGMENT, epoch, chosen, crop.draws))
            x = (torch.from_numpy(pixels).permute(0, 3, 1, 2).double() / 255 - 0.305) / 0.376
            y = torch.from_numpy(train.labels[chosen]).long()
            loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
            (loss / 4).backward()
            total_loss += loss.item() / 4
            statistics.append([(m.running_mean.clone(), m.running_var.clone()) for m in norms])
        for i, (mean, var) in enumerate(averages):
            mean.mul_(0.9).add_(sum(s[i][0] for s in statistics) / 4, alpha=0.1)
            var.mul_(0.9).add_(sum(s[i][1] for s in statistics) / 4, alpha=0.1)
        optimizer.step()
        optimizer.zero_grad()
        out.append(total_loss)
    for norm, (mean, var) in zip(norms, averages, strict=True):
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)
        norm.num_batches_tracked.fill_(20)
    return out, model.state_dict()
