"""Muon: torch's own optimizers on the same numbers, both memory layouts, and runs of one and two processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from processes import bits, newest
from worldsize.config.recipe import Optimizer, Recipe
from worldsize.errors import UserError
from worldsize.optim import optimizers

CPU = torch.device("cpu")
SETTINGS = Optimizer(name="muon", lr=0.02, momentum=0.95, weight_decay=0.05, norm_weight_decay=0.01)
RATES = (0.01, 0.02, 0.005)


def network(layout: torch.memory_format = torch.contiguous_format) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 5))
    return nn.Sequential(*layers).to(memory_format=layout)


def gradients(step: int, model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def trained(model: nn.Sequential, rates=RATES, first: int = 0, optimizer=None):
    optimizer = optimizer or optimizers.build(model, SETTINGS, CPU)
    for step, rate in enumerate(rates, start=first):
        for name, gradient in gradients(step, model).items():
            model.get_parameter(name).grad = gradient
        optimizers.set_lr(optimizer, rate)
        optimizer.step()
    return optimizer


def test_three_steps_equal_torchs_muon_and_adamw():
    ours, theirs = network(), network()
    trained(ours)
    matrices = {
        name: nn.Parameter(theirs.get_parameter(name).detach().flatten(1)) for name in ("0.weight", "2.weight", "4.weight")
    }
    muon = torch.optim.Muon(matrices.values(), lr=1, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    norms = [theirs.get_parameter(name) for name in ("0.bias", "1.weight", "1.bias", "2.bias", "4.bias", "5.bias")]
    adamw = torch.optim.AdamW(
        [{"params": [theirs[5].weight], "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.01}]
    )
    for step, rate in enumerate(RATES):
        for name, gradient in gradients(step, theirs).items():
            if name in matrices:
                matrices[name].grad = gradient.flatten(1)
            else:
                theirs.get_parameter(name).grad = gradient
        for part in (muon, adamw):
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
    for name, parameter in ours.named_parameters():
        expected = matrices.get(name, theirs.get_parameter(name))
        assert torch.equal(parameter.flatten(), expected.flatten()), name


def test_the_memory_layout_changes_only_rounding():
    plain, last = network(), network(torch.channels_last)
    trained(plain), trained(last)
    for one, other in zip(plain.parameters(), last.parameters(), strict=True):
        # The orthogonal matrix is computed in bfloat16.
        assert torch.allclose(one, other, atol=2e-3)
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_state_continues_bit_identically(layout):
    whole, first = network(layout), network(layout)
    trained(whole)
    before = trained(first, RATES[:2])
    saved = {name: value.clone() for name, value in optimizers.state_tensors(before, first).items()}
    assert saved["momentum_buffer/0.weight"].shape == first[0].weight.shape
    again = network(layout)
    again.load_state_dict(first.state_dict())
    fresh = optimizers.build(again, SETTINGS, CPU)
    optimizers.load_state_tensors(fresh, again, saved)
    trained(again, RATES[2:], 2, fresh)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_torch_without_muon_is_explained(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=r"requires torch 2\.9 or later; this is"):
        optimizers.build(network(), SETTINGS, CPU)


def test_graphs_are_refused():
    with pytest.raises(ValueError, match="cuda_graphs works with the optimizers sgd and adamw, not with muon"):
        Recipe.model_validate({"cuda_graphs": True, "optimizer": {"name": "muon"}})


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_bitwise_run_is_the_same_for_any_number_of_processes_and_after_an_interruption(ranks, size):
    small = (
        # Small matrices: CPUs multiply bfloat16 slowly.
        *(
            "digits",
            "--model.name",
            "shufflenet_v2_x0_5",
            "--global-batch",
            "16",
            "--micro-batch",
            "4",
            "--precision",
            "fp32",
        ),
        *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--data.val-resize-size", "16"),
        *("--optimizer.name", "muon", "--optimizer.lr", "0.001", "--parallel.strategy", "bitwise", "--checkpoint.no-best"),
    )
    if not (ranks.cwd / "runs" / "one").exists():
        ranks(1).run("train", *small, "--name", "one", "--stop-after", "3", code=75)
    ranks(size).run("train", *small, "--name", f"{size}", "--stop-after", "2", code=75)
    run = ranks.cwd / "runs" / f"{size}"
    ranks(size).run("train", "--resume", run, "--stop-after", "3", code=75)
    assert newest(run).name == "step-00000003"
    assert bits(run) == bits(ranks.cwd / "runs" / "one")
