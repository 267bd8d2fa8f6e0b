"""LARS and LAMB, compared with their papers' algorithms in plain NumPy, and RMSprop with its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from worldsize.config.recipe import Optimizer, Recipe
from worldsize.optim import optimizers

CPU = torch.device("cpu")
STEPS = 6


class Network(nn.Module):
    """A weight, a bias and a weight that is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)
        self.zero = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(self.zero.weight)
        self.to(torch.float64)


def gradients() -> list[dict[str, np.ndarray]]:
    """Of each step by parameter; those of ``zero`` are zero at first."""
    dice = np.random.default_rng(1)
    shapes = {name: tuple(p.shape) for name, p in Network().named_parameters()}
    found = [{name: dice.normal(size=shape) for name, shape in shapes.items()} for _ in range(STEPS)]
    found[0]["zero.weight"][:] = 0
    return found


def trained(settings: Optimizer) -> dict[str, np.ndarray]:
    network = Network()
    optimizer = optimizers.build(network, settings, CPU)
    for step, own in enumerate(gradients()):
        for name, parameter in network.named_parameters():
            parameter.grad = torch.from_numpy(own[name])
        optimizers.set_lr(optimizer, 0.1 / (step + 1))
        optimizer.step()
    return {name: p.detach().numpy() for name, p in network.named_parameters()}


def expected(update) -> dict[str, np.ndarray]:
    """``update(w, g, state, lr, decay, is_weight, step)`` returns the new w; step is 1-based."""
    weights = {name: p.detach().numpy().copy() for name, p in Network().named_parameters()}
    states = {name: {} for name in weights}
    for step, own in enumerate(gradients(), start=1):
        for name in weights:
            matrix = name != "layer.bias"
            decay = 0.01 if matrix else 0.002
            weights[name] = update(weights[name], own[name], states[name], 0.1 / step, decay, matrix, step)
    return weights


def lars(w, g, state, lr, decay, matrix, step):
    size, slope = np.linalg.norm(w), np.linalg.norm(g)
    trust = 0.02 * size / (slope + decay * size) if matrix and size > 0 and slope > 0 else 1.0
    state["v"] = 0.8 * state.get("v", 0) + lr * trust * (g + decay * w)
    return w - state["v"]


def lamb(w, g, state, lr, decay, matrix, step):
    state["m"] = 0.85 * state.get("m", 0) + 0.15 * g
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * g**2
    update = state["m"] / (1 - 0.85**step) / (np.sqrt(state["v"] / (1 - 0.95**step)) + 1e-5) + decay * w
    size, length = np.linalg.norm(w), np.linalg.norm(update)
    ratio = size / length if matrix and size > 0 and length > 0 else 1.0
    return w - lr * ratio * update


def rmsprop(w, g, state, lr, decay, matrix, step):
    g = g + decay * w
    state["v"] = 0.9 * state.get("v", 0) + 0.1 * g**2
    state["b"] = 0.8 * state.get("b", 0) + g / (np.sqrt(state["v"]) + 1e-5)
    return w - lr * state["b"]


@pytest.mark.parametrize(
    ("settings", "update"),
    [
        ({"name": "lars", "trust": 0.02}, lars),
        ({"name": "lamb", "betas": (0.85, 0.95), "eps": 1e-5}, lamb),
        ({"name": "rmsprop", "alpha": 0.9, "eps": 1e-5}, rmsprop),
    ],
)
def test_six_steps_equal_the_published_algorithm(settings, update):
    ours = trained(Optimizer(momentum=0.8, weight_decay=0.01, norm_weight_decay=0.002, **settings))
    for name, theirs in expected(update).items():
        np.testing.assert_allclose(ours[name], theirs, rtol=1e-12, atol=1e-14, err_msg=name)


def test_a_weight_that_begins_later_does_not_change_the_others():
    """As after a run resumed with more parts to train: it takes the steps of a fresh optimizer, they go on as alone."""
    both, apart = (nn.ParameterList([torch.ones(3, 2), torch.ones(2, 4)]) for _ in range(2))
    settings = Optimizer(name="lamb", lr=0.1)
    together = optimizers.build(both, settings, CPU)
    alone = [optimizers.build(nn.ParameterList([p]), settings, CPU) for p in apart]
    dice = torch.Generator().manual_seed(0)
    for step in range(6):
        for number in (0, 1) if step >= 3 else (1,):  # the first in the group is the last to begin
            both[number].grad = apart[number].grad = torch.randn(both[number].shape, generator=dice)
            alone[number].step()
        together.step()
    assert all(torch.equal(a, b) for a, b in zip(both, apart, strict=True))


def test_graphs_with_these_optimizers_are_refused():
    with pytest.raises(ValueError, match="cuda_graphs works with the optimizers sgd and adamw, not with lamb"):
        Recipe.model_validate({"cuda_graphs": True, "optimizer": {"name": "lamb"}})
