"""Lion and NAdamW, compared with timm's: weights, a bias, and a weight that is trained from the third step on."""

from __future__ import annotations

import pytest
import timm.optim
import torch
from torch import nn

from worldsize.config.recipe import Optimizer
from worldsize.optim import optimizers

LATE = "late.weight"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.late = nn.Linear(5, 3), nn.Linear(2, 2, bias=False)
        self.to(torch.float64)


def trained(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    for step in range(8):
        for name, parameter in network.named_parameters():
            gradient = torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
            parameter.grad = None if name == LATE and step < 2 else gradient
        optimizers.set_lr(optimizer, 0.1 / (step + 1))
        optimizer.step()
    return dict(network.named_parameters())


@pytest.mark.parametrize(
    ("theirs", "settings"),
    [
        (timm.optim.Lion, {"name": "lion", "betas": (0.9, 0.99)}),
        (timm.optim.Lion, {"name": "lion", "betas": (0.8, 0.95)}),
        (timm.optim.NAdamW, {"name": "nadamw", "eps": 1e-5}),
        (timm.optim.NAdamW, {"name": "nadamw", "betas": (0.8, 0.95)}),
    ],
)
def test_eight_steps_equal_timms(theirs, settings):
    ours = Optimizer(weight_decay=0.05, norm_weight_decay=0.002, **settings)
    network = Network()
    groups = [
        {"params": [network.layer.weight, network.late.weight], "weight_decay": 0.05},
        {"params": [network.layer.bias], "weight_decay": 0.002},
    ]
    eps = {"eps": ours.eps or 1e-8} if ours.name == "nadamw" else {}
    expected = trained(network, theirs(groups, lr=0.1, betas=ours.betas, **eps))
    own = Network()
    for name, weight in trained(own, optimizers.build(own, ours, torch.device("cpu"))).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)
