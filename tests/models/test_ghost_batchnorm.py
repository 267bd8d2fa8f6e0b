"""Several micro-batches in one forward pass: the numbers of separate forward passes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from paths import SMALL_NETWORK
from processes import distance, losses, records, weights
from worldsize import cli
from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan
from worldsize.errors import UserError
from worldsize.models import factory, ghost_batchnorm

# A low learning rate: at a high one, training amplifies rounding.
SETTINGS = (
    *("--precision", "fp64", "--global-batch", "48", "--micro-batch", "12"),
    *("--max-steps", "6", "--optimizer.lr", "0.0005", "--optimizer.lr-reference-batch", "48"),
)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)]
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("fused", [False, True])
@given(groups=st.integers(1, 4), group=st.integers(2, 5), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_groups_are_normalized_as_if_they_were_batches_of_their_own(fused, groups, group, seed):
    separate, together = network(), network()
    for layer in factory.norms(separate):
        layer.momentum = 1.0
    ghost_batchnorm.split_norms(together, group, groups)
    if fused:
        for layer in factory.norms(together):
            layer.forward = lambda x, layer=layer: layer._fused(x, groups)
    x = torch.randn(groups * group, 3, 6, 6, generator=torch.Generator().manual_seed(seed)).double()
    outputs, statistics = [], []
    for part in x.split(group):
        outputs.append(separate(part))
        statistics.append([b.clone() for name, b in separate.named_buffers() if "running" in name])
    y = together(x)
    torch.testing.assert_close(y, torch.cat(outputs), rtol=1e-12, atol=1e-12)
    for i, own in enumerate(statistics):
        found = [buffer for layer in factory.norms(together) for buffer in layer.statistics[i]]
        torch.testing.assert_close(found, own, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (torch.cat(outputs) * weight).sum().backward()
    for a, b in zip(together.parameters(), separate.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


class Returned(TorchFunctionMode):
    """``again``: the functions of torch that returned a tensor which is an input, or which another one has returned."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self._known = list(inputs)
        self.again: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in (one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, torch.Tensor)):
            self.again += [function.__name__] if any(tensor is other for other in self._known) else []
            self._known.append(tensor)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_tensor_of_the_fused_form_has_two_names(dtype):
    """The compiler of torch 2.11 loses the gradient of an output that is also an intermediate value."""
    inputs = torch.randn(8, 4, 2, 2).to(dtype), torch.rand(4), torch.rand(4)
    with Returned(*inputs) as returned:
        ghost_batchnorm._normalized(*inputs, 2, 1e-5)
    assert returned.again == []


def test_evaluation_and_names_are_those_of_batchnorm():
    plain = network()
    split = copy.deepcopy(plain)
    ghost_batchnorm.split_norms(split, 2, 2)
    assert list(split.state_dict()) == list(plain.state_dict())
    # Each buffer is an input of a compiled network.
    assert len(list(split.buffers())) == len(list(plain.buffers())) + len(factory.norms(plain))
    x = torch.randn(4, 3, 6, 6).double()
    assert torch.equal(split.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(
    ("model", "size", "forward_batch"),
    [(SMALL_NETWORK, 1, 24), (SMALL_NETWORK, 2, 24), pytest.param("shufflenet_v2_x0_5", 1, 48, marks=pytest.mark.slow)],
)
def test_large_forward_passes_give_the_numbers_of_separate_ones(ranks, model, size, forward_batch):
    runs = []
    for kind, own in (("separate", "12"), ("together", str(forward_batch))):
        name = f"{kind}-{size}-{forward_batch}"
        ranks(size).run("train", "digits", "--model.name", model, *SETTINGS, "--forward-batch", own, "--name", name)
        runs.append(ranks.cwd / "runs" / name)
    separate, together = runs
    assert losses(together) == pytest.approx(losses(separate), rel=1e-10)
    assert distance(weights(together), weights(separate)) < 1e-9
    assert [s["samples"] for s in records(together, "step")] == [s["samples"] for s in records(separate, "step")]
    assert [s["top1"] for s in records(together, "step")] == [s["top1"] for s in records(separate, "step")]


@given(groups=st.integers(1, 12), micro=st.integers(1, 40), devices=st.integers(1, 4), limit=st.integers(1, 600))
def test_the_largest_forward_batch_divides_the_samples_of_a_device(groups, micro, devices, limit):
    whole = batch_plan.BatchPlan(groups * micro * devices, micro, 1, devices)
    plan = batch_plan.with_largest_forward_batch(whole, limit)
    assert plan.accumulation * plan.groups == groups and plan.per_process == whole.per_process
    assert plan.groups == 1 or plan.groups * micro <= limit
    larger = [g for g in range(plan.groups + 1, groups + 1) if groups % g == 0]
    assert not larger or min(larger) * micro > limit


def test_a_forward_batch_that_does_not_fit_is_refused_with_those_that_do():
    with pytest.raises(UserError, match=r"forward-batch 96 .* 128 samples per step, .* of 32.*fit: 32, 64, 128"):
        batch_plan.with_forward_batch(batch_plan.BatchPlan(256, 32, 2), 96)
    recipe = Recipe(global_batch=256, micro_batch=32, forward_batch=96)
    with pytest.raises(UserError, match="--forward-batch 96 does not fit"):
        batch_plan.plan(recipe, 2)
    assert batch_plan.plan(recipe.model_copy(update={"forward_batch": 64}), 2).accumulation == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--parallel.strategy", "bitwise", "--forward-batch", "64"),
            "strategy bitwise, which needs each micro-batch",
        ),
        (("--model.name", "mobilenet_v2", "--forward-batch", "64"), "draws random numbers"),
        (("--model.name", "timm:efficientnet_b0", "--forward-batch", "64"), "BatchNorm layers of an unknown type"),
    ],
)
def test_what_would_change_the_numbers_is_refused(tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "digits", *arguments]) == 64
    assert message in capfd.readouterr().err
