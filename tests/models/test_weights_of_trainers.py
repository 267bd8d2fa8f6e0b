"""Weights in the files that other trainers save, next to what else is in them."""

from __future__ import annotations

import argparse
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
