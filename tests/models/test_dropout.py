"""Dropout before the classifier: the plain network in evaluation, zeros and scaled values in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.models import factory, networks

CPU = torch.device("cpu")


def network(name: str, probability: float | None, setting: str = "dropout") -> nn.Module:
    settings = {"name": name, setting: probability, "zero_init": False}  # residuals that drop paths could drop
    return factory.build(Recipe.model_validate({"model": settings}), 5, CPU, torch.float64)


DROPOUT = [("dropout", name) for name in ("resnet18", "mobilenet_v3_small", "timm:resnet18")]
DROP_PATH = [("drop_path", name) for name in ("resnet18", "resnet50")]


@pytest.mark.parametrize(("setting", "name"), DROPOUT + DROP_PATH)
def test_evaluation_is_that_of_the_plain_network(setting, name):
    plain, dropping = network(name, None, setting).eval(), network(name, 0.5, setting).eval()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert torch.equal(plain(images), dropping(images))
    assert plain.state_dict().keys() == dropping.state_dict().keys()


def test_dropped_inputs_are_zero_and_the_others_scaled():
    torch.manual_seed(0)
    inputs = torch.rand(4, 512, dtype=torch.float64) + 1
    classifier = network("resnet18", 0.25).fc
    classifier.weight.data = torch.eye(512, dtype=torch.float64)
    classifier.bias.data = torch.zeros(512, dtype=torch.float64)
    out = classifier(inputs)
    kept = out != 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(out[kept], inputs[kept] / 0.75)


@pytest.mark.parametrize(("name", "layers"), [("mobilenet_v3_small", 1), ("vgg11", 2), ("squeezenet1_1", 1)])
def test_dropout_layers_next_to_the_classifier_get_the_probability(name, layers):
    assert [m.p for m in network(name, 0.3).modules() if isinstance(m, nn.Dropout)] == [0.3] * layers
    assert all(type(layer) in (nn.Linear, nn.Conv2d) for layer in networks.classifiers(network(name, 0.3)).values())


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "timm:resnet18", "timm:vit_tiny_patch16_224"])
def test_it_counts_as_random(name):
    assert factory.uses_random_draws(network(name, 0.1))
    assert not factory.uses_random_draws(network(name, 0.0))


def test_timms_networks_get_timms_option():
    assert network("timm:resnet18", 0.3).drop_rate == 0.3
    assert network("timm:vit_tiny_patch16_224", 0.3).head_drop.p == 0.3
