"""worldsize:cifarnet has the properties that its paper builds on (Jordan 2024, arXiv 2404.00498, section 3)."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.models import factory
from worldsize.models.networks.cifarnet import Block, whitening


def network(classes=10, **settings) -> nn.Module:
    recipe = Recipe.model_validate({"model": {"name": "worldsize:cifarnet", **settings}})
    return factory.build(recipe, classes, torch.device("cpu"), torch.float64)


def smooth_images(count: int) -> torch.Tensor:
    """Images whose amplitudes fall with the frequency, as those of natural images do, gray but for a little color."""
    generator = torch.Generator().manual_seed(0)
    fx, fy = torch.fft.fftfreq(32), torch.fft.rfftfreq(32)
    radius = torch.sqrt(fx[:, None] ** 2 + fy**2).clamp_min(1 / 32)
    noise = torch.randn(count, 3, 32, 17, 2, generator=generator)
    images = torch.fft.irfft2(torch.view_as_complex(noise) / radius**1.2)
    gray = images[:, :1]
    images = gray + torch.tensor([0.3, 0.1, -0.3]).view(3, 1, 1) * images[:, 1:2] + 0.05 * images[:, 2:]
    return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)


def correlation(values: torch.Tensor) -> float:
    """The mean absolute correlation of the 12 channels of (n, 12, H, W), or of the 12 pixels of 2 x 2 patches."""
    matrix = torch.corrcoef(values.transpose(0, 1).reshape(12, -1))
    return (matrix - torch.eye(12)).abs().sum().item() / (12 * 11)


def test_the_first_layer_takes_away_the_correlation_of_neighbors_and_of_colors():
    images = smooth_images(64)
    patches = functional.unfold(images, 2).unflatten(2, (31, 31))
    assert correlation(patches) > 0.7
    assert correlation(functional.conv2d(images, whitening()[:12])) < 0.1


def test_the_filters_are_orthogonal_as_eigenvectors_are_and_come_with_their_negatives():
    filters = whitening().flatten(1)
    assert torch.equal(filters[12:], -filters[:12])
    directions = functional.normalize(filters[:12], dim=1)
    assert (directions @ directions.T - torch.eye(12)).abs().max() < 0.05


def test_convolutions_begin_as_the_identity():
    block = Block(24, 64)
    images = torch.randn(2, 24, 8, 8)
    assert torch.equal(block.conv1(images)[:, :24], images)
    after = torch.randn(2, 64, 4, 4)
    assert torch.equal(block.conv2(after), after)


def test_the_biases_of_batchnorm_learn_64_times_as_fast():
    block, reference = Block(4, 4).double(), nn.BatchNorm2d(4).double()
    images, target = torch.randn(2, 8, 4, 6, 6, dtype=torch.float64)
    before = 8 * block.norm2(images)
    assert torch.allclose(before, reference(images))
    functional.mse_loss(before, target).backward()
    functional.mse_loss(reference(images), target).backward()
    assert block.norm2.weight.grad is None
    assert torch.allclose(8 * block.norm2.bias.grad, 64 * reference.bias.grad)


def test_only_the_filters_and_the_weights_of_norms_are_constant():
    model = network()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == 9 * (24 * 64 + 64**2 + 64 * 256 + 3 * 256**2) + 2 * (64 + 256 + 256) + 24 + 10 * 256  # 2.0 million
    constant = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert constant == {"whitening.weight", *(f"layers.{i}.norm{j}.weight" for i in range(3) for j in (1, 2))}


@pytest.mark.parametrize("side", [16, 32, 64])
def test_images_of_several_sizes(side):
    assert network(classes=7)(torch.randn(2, 3, side, side, dtype=torch.float64)).shape == (2, 7)


def test_what_it_lacks_is_refused():
    with pytest.raises(UserError, match="worldsize has no network 'alexnet' of its own; it has cifarnet"):
        network(name="worldsize:alexnet")
    with pytest.raises(UserError, match=r"--model\.drop-path: worldsize:cifarnet has no residual blocks"):
        network(drop_path=0.1)
    with pytest.raises(UserError, match="the classifier of worldsize:cifarnet has no bias"):
        network(head_bias=-2.3)
