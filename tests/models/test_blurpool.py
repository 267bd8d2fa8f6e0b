"""BlurPool equals ffcv-imagenet's definition and keeps the names of the state dict."""

import pytest
import torch
from torch.nn import functional

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.models import factory
from worldsize.models.blurpool import BlurConv2d

CPU = torch.device("cpu")


def network(**settings) -> torch.nn.Module:
    return factory.build(Recipe.model_validate({"model": {"name": "resnet18", **settings}}), 5, CPU, torch.float64)


def test_the_weights_and_their_names_stay_the_same():
    plain, blurred = network().state_dict(), network(blurpool=True).state_dict()
    assert plain.keys() == blurred.keys()
    assert all(torch.equal(plain[name], blurred[name]) for name in plain)


def test_the_convolutions_that_blur_are_those_with_a_stride_but_the_first():
    names = [name for name, module in network(blurpool=True).named_modules() if isinstance(module, BlurConv2d)]
    expected = [f"layer{i}.0.{part}" for i in (2, 3, 4) for part in ("conv1", "downsample.0")]
    assert names == expected


def test_a_convolution_sees_the_blurred_image():
    layer = network(blurpool=True).layer2[0].conv1
    images = torch.randn(2, 64, 9, 9, dtype=torch.float64)
    one = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) / 4
    padded = functional.pad(images, (1, 1, 1, 1))
    rows = one[0] * padded[:, :, :-2] + one[1] * padded[:, :, 1:-1] + one[2] * padded[:, :, 2:]
    blurred = one[0] * rows[..., :-2] + one[1] * rows[..., 1:-1] + one[2] * rows[..., 2:]
    torch.testing.assert_close(layer(images), functional.conv2d(blurred, layer.weight, stride=2, padding=1))


def test_a_network_without_such_convolutions_is_refused():
    with pytest.raises(UserError, match="vit_b_16 has no convolution that it could blur"):
        network(name="vit_b_16", blurpool=True)
