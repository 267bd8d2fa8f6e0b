"""Sharpness-aware minimization: its formula, a plain PyTorch loop, and runs of one and two processes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paths import SMALL_NETWORK
from processes import bits, newest, records, weights, worldsize
from worldsize import parallel
from worldsize.config.recipe import Optimizer, Recipe
from worldsize.errors import UserError
from worldsize.optim import sharpness

SMALL = (
    *("digits", "--model.name", SMALL_NETWORK, "--global-batch", "16", "--micro-batch", "4"),
    *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--data.val-resize-size", "16"),
)
SAM = ("--optimizer.sam-rho", "0.5", "--optimizer.sam-every", "2")


def test_weights_move_along_the_gradient_and_come_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    model[1].bias.requires_grad_(False)
    model(torch.randn(5, 3, dtype=torch.float64)).square().sum().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    length = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    with sharpness.ascended(model, 0.7):
        for name, p in model.named_parameters():
            moved = 0.7 * gradients[name] / length if name in gradients else torch.zeros_like(p)
            torch.testing.assert_close(p.detach(), before[name] + moved, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(model.get_parameter(name).grad, gradient) for name, gradient in gradients.items())


def test_it_is_due_in_every_nth_step():
    assert [sharpness.due(Optimizer(sam_rho=0.1, sam_every=3), step) for step in range(5)] == [1, 0, 0, 1, 0]
    assert not sharpness.due(Optimizer(), 0)


@pytest.mark.parametrize("strategy", ["horovod", "adasum", "localsgd", "async"])
def test_strategies_without_a_common_gradient_refuse_it(strategy):
    recipe = Recipe.model_validate({"parallel": {"strategy": strategy}, "optimizer": {"sam_rho": 0.1}})
    with pytest.raises(UserError, match=rf"sam_rho 0\.1 does not work with strategy {strategy}"):
        parallel.validate(recipe)


def test_powersgd_refuses_it():
    """Its memory would carry the error of the gradient that is not applied into the one that is."""
    settings = {"parallel": {"compression": "powersgd"}, "optimizer": {"sam_rho": 0.1}}
    with pytest.raises(UserError, match=r"powersgd adds its error .* of optimizer\.sam_rho 0\.1 only the second is applied"):
        parallel.validate(Recipe.model_validate(settings))
    parallel.validate(Recipe.model_validate(settings | {"parallel": {"compression": "bf16"}}))


def test_graphs_are_refused():
    with pytest.raises(ValueError, match=r"cuda_graphs does not work with optimizer\.sam_rho"):
        Recipe.model_validate({"cuda_graphs": True, "optimizer": {"sam_rho": 0.1}})


OVERFLOWS = """
from torch import nn


class Large(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, classes)
        self.norm, self.drawn = nn.BatchNorm2d(8), nn.InstanceNorm2d(8, track_running_stats=STATE)

    def forward(self, x):
        return self.head(self.drawn(self.norm(self.conv(x)).relu()).abs().mean((2, 3)))


def build(classes):
    return Large(classes)
"""


@pytest.mark.parametrize(
    ("size", "strategy", "network"),
    [(1, "single", "STATE"), (2, "ddp", "False"), (2, "bitwise", "False"), (1, "single", "worldsize:cifarnet")],
)
def test_a_gradient_that_overflows_leaves_no_nan_in_a_buffer(ranks, size, strategy, network):
    """The point to which it leads has no numbers. The loss scaler skips the step."""
    name = f"overflow-{size}-{strategy}-{network[-3:]}"
    net = ranks.cwd / f"net_{network[:3]}.py"
    net.write_text(OVERFLOWS.replace("STATE", str(network == "STATE")))
    more = ("--precision", "fp16", "--device", "cpu", "--loss.class-weights", *["30"] * 10, "--max-steps", "6")
    model = network if ":" in network else f"{net}:build"
    settings = ("--model.name", model, "--optimizer.sam-rho", "0.1", "--parallel.strategy", strategy)
    ranks(size).run("train", *SMALL, *more, *settings, "--name", name)
    run = ranks.cwd / "runs" / name
    assert not math.isfinite(records(run, "step")[0]["grad_norm"] or math.nan)
    assert [key for key, tensor in weights(run).items() if not tensor.isfinite().all()] == []


@pytest.mark.slow
def test_it_equals_a_plain_loop_at_every_world_size(tmp_path):
    plain = ("--precision", "fp64", "--strategy", "ddp", "--steps", "3", "--procs", "1,2", "--against", "torch")
    done = worldsize("prove", *SMALL, *SAM, *plain, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_bitwise_run_is_the_same_for_any_number_of_processes_and_after_an_interruption(ranks, size):
    exact = (*SMALL, "--precision", "fp32", "--parallel.strategy", "bitwise")
    if not (ranks.cwd / "runs" / "one").exists():
        ranks(1).run("train", *exact, *SAM, "--name", "one", "--stop-after", "4", code=75)
        ranks(1).run("train", *exact, "--name", "without", "--stop-after", "4", code=75)
    ranks(size).run("train", *exact, *SAM, "--name", f"{size}", "--stop-after", "2", code=75)
    run = ranks.cwd / "runs" / f"{size}"
    ranks(size).run("train", "--resume", run, "--stop-after", "4", code=75)
    assert newest(run).name == "step-00000004"
    assert bits(run) == bits(ranks.cwd / "runs" / "one") != bits(ranks.cwd / "runs" / "without")
