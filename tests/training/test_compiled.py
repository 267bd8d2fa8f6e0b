"""A compiled network computes what the network does."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.training import build
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiled_network_draws_the_same_random_numbers():
    """model.compile may change a run by rounding only, also that of a network with dropout."""
    recipe, cpu = Recipe(), torch.device("cpu")
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 8 * 8, 10))
    objective = Objective(network, Normalise(recipe.data, cpu, torch.float32), Precision("fp32", cpu), recipe)
    pixels, labels = torch.randint(0, 256, (32, 8, 8, 3), dtype=torch.uint8), torch.arange(32) % 10
    losses = []
    for module in (objective, build.compiled(objective)):
        torch.manual_seed(3)
        losses.append(module(pixels, labels)[0])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
