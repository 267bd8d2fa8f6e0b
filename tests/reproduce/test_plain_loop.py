"""The plain PyTorch loop that `prove --against torch` compares with."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.loader import Batch
from worldsize.reproduce.plain_loop import _Loop
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision


class Steep(nn.Module):
    """A network whose gradients overflow fp16 at the first loss scale, 65,536, and not at a hundredth of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1000 * (x.mean((2, 3)) @ self.weight)


def test_after_overflows_the_loss_scale_is_low_enough_to_train():
    recipe, cpu, network = Recipe(), torch.device("cpu"), Steep()
    number_format = Precision("fp16", cpu)
    objective = Objective(network, Normalise(recipe.data, cpu, torch.float32), number_format, recipe)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)
    loop = _Loop(recipe, network, optimizer, number_format, objective, number_format.scaler())
    batch = Batch(torch.full((2, 4, 4, 3), 200, dtype=torch.uint8), torch.tensor([0, 0]), np.arange(2))
    moved = []
    for step in range(12):
        loop.step(step, [batch])
        moved.append(bool(network.weight.any()))
    assert not moved[0] and moved[-1]
