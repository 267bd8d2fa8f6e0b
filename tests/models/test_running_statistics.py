"""Running statistics of layers that have overflowed, that a forward pass leaves out, or that read them in training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from worldsize.distributed.tree_sum import fold
from worldsize.models import ghost_batchnorm
from worldsize.models.factory import RunningStatistics


class Leaving(nn.Module):
    """A network of two layers, of which forward passes may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3, momentum=0.3), nn.BatchNorm2d(3, momentum=0.2)

    def forward(self, x: torch.Tensor, uses: bool = True) -> torch.Tensor:
        x = self.first(x)
        return self.second(2 * x + 1) if uses else x


def images(seed: int, n: int = 4) -> torch.Tensor:
    return torch.randn(n, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def plain(network: nn.Module) -> Callable[..., torch.Tensor]:
    return network


def ghost(network: nn.Module) -> Callable[..., torch.Tensor]:
    ghost_batchnorm.split_norms(network, 2, 2)
    return network


def compiled(network: nn.Module) -> Callable[..., torch.Tensor]:
    return torch.compile(network, backend="aot_eager")


def compiled_ghost(network: nn.Module) -> Callable[..., torch.Tensor]:
    return compiled(ghost(network))


FORMS = [plain, ghost, compiled, compiled_ghost]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_pass_that_overflows_leaves_nothing_in_the_layers(form, own, value):
    """As the second pass of SAM with an infinite gradient, whose statistics nobody takes."""
    expected = []
    for overflows in (False, True):
        network = Leaving()
        forward, statistics = form(network), RunningStatistics(network, own)
        if overflows:
            forward(torch.full((4, 3, 5, 5), value))
            statistics.collect(0)
            statistics.take()
        statistics.clear()
        forward(images(1))
        statistics.collect(0)
        statistics.advance(fold(statistics.take(), torch.add))
        expected.append(statistics.current.clone())
    assert expected[0].isfinite().all() and torch.equal(*expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("uses", [(0, 1, 1, 0), (1, 0, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1)])
def test_a_layer_has_the_statistics_of_the_micro_batches_that_used_it(form, uses):
    network = Leaving()
    forward, statistics = form(network), RunningStatistics(network, own=True)
    averages = {"1.mean": torch.zeros(3), "1.var": torch.ones(3)}
    for step in range(2):
        statistics.clear()
        means, variances = [], []
        for micro, used in enumerate(uses):
            x = images(10 * step + micro)
            forward(x, bool(used))
            statistics.collect(micro)
            for part in x.chunk(2) if "ghost" in form.__name__ else [x]:
                normalized = 2 * nn.functional.batch_norm(part, None, None, training=True) + 1
                means += [normalized.mean((0, 2, 3))] * used
                variances += [normalized.var((0, 2, 3))] * used
        statistics.advance(fold(statistics.take(), torch.add) / len(uses))
        with statistics.averaged(_Alone, step):  # an evaluation changes what is in the layers
            pass
        for name, found in (("1.mean", means), ("1.var", variances)):
            if found:
                averages[name] = 0.8 * averages[name] + 0.2 * torch.stack(found).mean(0)
    for name, average in averages.items():
        torch.testing.assert_close(statistics.tensors()[name], average, rtol=1e-5, atol=1e-6)
    assert not torch.equal(statistics.tensors()["0.mean"], torch.zeros(3))


class _Alone:
    size = 1


@pytest.mark.parametrize("micro_batches", [1, 3, 41])
@pytest.mark.parametrize("form", [plain, ghost])
def test_where_every_pass_uses_every_layer_the_bits_are_those_of_other_networks(form, micro_batches):
    """41 * (1 / 41) is not 1 in float32."""
    found = []
    for own in (False, True):
        network = Leaving()
        forward, statistics = form(network), RunningStatistics(network, own)
        for micro in range(micro_batches):
            forward(images(micro))
            statistics.collect(micro)
        statistics.advance(fold(statistics.take(), torch.add) * torch.tensor(1 / micro_batches))
        found.append(statistics.current)
    assert torch.equal(*found)


class Renormalizing(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.running_var.sqrt().clone()
        return super().forward(x) / scale[:, None, None] if self.training else super().forward(x)


class Moving(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.momentum = 0.1
        return super().forward(x)


class Activated(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(("kind", "cleared"), [(Renormalizing, 0), (Moving, 0), (Activated, 1), (nn.BatchNorm2d, 1)])
def test_a_layer_that_uses_its_statistics_in_training_keeps_them(kind, cleared):
    layer = kind(3)
    statistics = RunningStatistics(layer, own=True)
    layer(images(0))
    before = layer.running_var.clone()
    drawn = torch.get_rng_state()
    statistics.clear()
    assert torch.equal(layer.running_var, torch.full((3,), -1.0) if cleared else before)
    assert torch.equal(torch.get_rng_state(), drawn)
