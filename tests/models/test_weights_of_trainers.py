"""Weights in the files that other trainers save, next to what else is in them."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver
from torch import nn

from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.models import factory, pretrained

CPU = torch.device("cpu")
ARGUMENTS = argparse.Namespace(model="resnet18", lr=0.1, opt="sgd", betas=None, mean=(0.5, 0.5, 0.5))


def loaded(path: Path, **model: object) -> nn.Module:
    """The network for 4 classes with the weights of this file."""
    recipe = Recipe.model_validate({"model": {"name": "resnet18", "weights": str(path), **model}})
    network = factory.build(recipe, 4, CPU, torch.float32)
    pretrained.load(network, recipe)
    return network


def equals(network: nn.Module, source: nn.Module) -> bool:
    state = source.state_dict()
    return all(torch.equal(tensor, state[key]) for key, tensor in network.state_dict().items())


def test_a_checkpoint_of_timm_with_its_arguments(tmp_path):
    source = timm.create_model("resnet18", num_classes=4)
    optimizer = create_optimizer_v2(source, "sgd", lr=0.1)
    saver = CheckpointSaver(source, optimizer, args=ARGUMENTS, checkpoint_dir=tmp_path, recovery_dir=tmp_path)
    saver.save_checkpoint(0, metric=12.5)
    assert equals(loaded(tmp_path / "last.pth.tar"), source)


def test_a_checkpoint_of_torchvision_with_its_arguments(tmp_path):
    source = torchvision.models.resnet18(num_classes=4)
    optimizer = torch.optim.SGD(source.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    saved = {"model": source, "optimizer": optimizer, "lr_scheduler": scheduler}
    states = {name: one.state_dict() for name, one in saved.items()}
    torch.save(states | {"epoch": 0, "args": ARGUMENTS}, tmp_path / "checkpoint.pth")
    assert equals(loaded(tmp_path / "checkpoint.pth"), source)
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_a_class_that_is_refused_is_named_with_what_to_save(tmp_path):
    torch.save(torchvision.models.resnet18(), tmp_path / "whole.pth")
    with pytest.raises(UserError, match=r"\(torchvision.models.resnet.ResNet\), which is not allowed: .*\.state_dict\(\)"):
        loaded(tmp_path / "whole.pth")


def test_arguments_that_would_execute_code_are_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            return ((tmp_path / "executed").touch, ())

    torch.save({"model": {}, "args": argparse.Namespace(x=Hostile())}, tmp_path / "hostile.pth")
    with pytest.raises(UserError, match="contains objects other than tensors"):
        loaded(tmp_path / "hostile.pth")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_of_composer(tmp_path, prefix):
    source = torchvision.models.resnet18(num_classes=4)
    state = {prefix + key: tensor for key, tensor in source.state_dict().items()}
    torch.save({"state": {"model": state, "optimizers": {}}, "rng": []}, tmp_path / "ep1.pt")
    assert equals(loaded(tmp_path / "ep1.pt"), source)


class Blurring(nn.Module):
    """As ffcv-imagenet's and Composer's: a module around the convolution."""

    def __init__(self, conv: nn.Conv2d, kernel: torch.Tensor) -> None:
        super().__init__()
        self.conv = conv
        self.register_buffer("blur_filter", kernel.repeat(conv.in_channels, 1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        blurred = nn.functional.conv2d(images, self.blur_filter, padding=1, groups=self.conv.in_channels)
        return self.conv(blurred)


KERNEL = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16


def blurring(source: nn.Module, kernel: torch.Tensor = KERNEL) -> nn.Module:
    """A copy whose convolutions with a stride blur, all but the first."""
    network = copy.deepcopy(source)
    for stage in (network.layer2, network.layer3, network.layer4):
        stage[0].conv1 = Blurring(stage[0].conv1, kernel)
        stage[0].downsample[0] = Blurring(stage[0].downsample[0], kernel)
    return network


@pytest.mark.parametrize("wrapper", [lambda network: network, nn.DataParallel])
def test_weights_of_a_network_that_blurs(tmp_path, wrapper, caplog):
    source = torchvision.models.resnet18(num_classes=4)
    theirs = wrapper(blurring(source))
    torch.save(theirs.state_dict(), tmp_path / "final_weights.pt")
    ours = loaded(tmp_path / "final_weights.pt", blurpool=True)
    assert equals(ours, source) and not caplog.records
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))
    with pytest.raises(UserError, match=r"blurs before convolutions: pass --model\.blurpool"):
        loaded(tmp_path / "final_weights.pt")


def test_a_pooling_that_blurs_is_a_warning(tmp_path, caplog):
    source = torchvision.models.resnet18(num_classes=4)
    state = blurring(source).state_dict() | {"maxpool.blur_filter": KERNEL.reshape(1, 1, 3, 3)}
    torch.save({"state": {"model": state}}, tmp_path / "ep1.pt")
    assert equals(loaded(tmp_path / "ep1.pt", blurpool=True), source)
    assert "a maximum pooling that blurs (maxpool)" in caplog.text


def test_another_kernel_belongs_to_another_network(tmp_path):
    torch.save(blurring(torchvision.models.resnet18(num_classes=4), KERNEL**2).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"belongs to another model: .*'layer2.0.conv1.blur_filter'"):
        loaded(tmp_path / "w.pt", blurpool=True)
