"""SGD with decoupled weight decay, compared with its formula in plain NumPy; runs of one and two processes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from paths import SMALL_NETWORK
from processes import bits, newest
from worldsize.config.recipe import Optimizer, Recipe
from worldsize.errors import UserError
from worldsize.models import networks
from worldsize.models.networks import build
from worldsize.optim import optimizers

CPU = torch.device("cpu")


@pytest.mark.parametrize("nesterov", [False, True])
def test_four_steps_equal_the_formula(nesterov):
    network = nn.Linear(3, 2).double()
    settings = Optimizer(name="sgdw", lr=1.0, momentum=0.8, nesterov=nesterov, weight_decay=0.1, norm_weight_decay=0.02)
    optimizer = optimizers.build(network, settings, CPU, peak=4.0)
    expected = [p.detach().numpy().copy() for p in network.parameters()]
    velocities = [np.zeros_like(w) for w in expected]
    dice = np.random.default_rng(0)
    for lr in (1.0, 4.0, 2.0, 0.5):
        optimizers.set_lr(optimizer, lr)
        for i, (parameter, decay) in enumerate(zip(network.parameters(), (0.1, 0.02), strict=True)):
            gradient = dice.normal(size=parameter.shape)
            parameter.grad = torch.from_numpy(gradient.copy())
            velocities[i] = 0.8 * velocities[i] + gradient
            update = gradient + 0.8 * velocities[i] if nesterov else velocities[i]
            # The decay of a step at the peak rate, 4, is the setting itself.
            expected[i] = expected[i] * (1 - decay * lr / 4.0) - lr * update
        optimizer.step()
    for parameter, value in zip(network.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=1e-13)


def test_slower_layers_decay_as_fast():
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    settings = Optimizer(name="sgdw", lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.1, head_lr=0.01)
    optimizer = optimizers.build(network, settings, CPU, peak=1.0)
    before = [layer.weight.detach().clone() for layer in network]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.set_lr(optimizer, 1.0)
    optimizer.step()
    for layer, weight in zip(network, before, strict=True):
        torch.testing.assert_close(layer.weight.detach(), 0.9 * weight)


def test_the_classifier_starts_at_its_bias():
    recipe = Recipe.model_validate({"model": {"name": "resnet18", "head_bias": -math.log(10)}})
    assert torch.equal(build(recipe, 10).fc.bias, torch.full((10,), -math.log(10)))
    with pytest.raises(UserError, match=r"--model\.head-bias 1: the classifier of plain has no bias"):
        networks._fill_biases([nn.Linear(2, 2, bias=False)], 1.0, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_bitwise_run_is_the_same_for_any_number_of_processes_and_after_an_interruption(ranks, size):
    small = (
        *("digits", "--model.name", SMALL_NETWORK, "--global-batch", "16", "--micro-batch", "4", "--precision", "fp32"),
        *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--data.val-resize-size", "16"),
        *("--optimizer.name", "sgdw", "--optimizer.weight-decay", "0.01", "--parallel.strategy", "bitwise"),
    )
    if not (ranks.cwd / "runs" / "one").exists():
        ranks(1).run("train", *small, "--name", "one", "--stop-after", "3", code=75)
    ranks(size).run("train", *small, "--name", f"{size}", "--stop-after", "2", code=75)
    run = ranks.cwd / "runs" / f"{size}"
    ranks(size).run("train", "--resume", run, "--stop-after", "3", code=75)
    assert newest(run).name == "step-00000003"
    assert bits(run) == bits(ranks.cwd / "runs" / "one")
