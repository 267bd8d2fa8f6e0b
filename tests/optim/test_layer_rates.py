"""Learning rates by layer: `optimizer.layer_decay`."""

from __future__ import annotations

import re
from collections import OrderedDict

import pytest
import timm
import timm.optim
import torch
import torchvision
from torch import nn

from worldsize.config.recipe import Optimizer, Recipe
from worldsize.errors import UserError
from worldsize.models import factory, networks
from worldsize.optim import optimizers

CPU = torch.device("cpu")


def recipe(name: str) -> Recipe:
    data = {"train_crop_size": 32, "val_crop_size": 32, "val_resize_size": 32}
    return Recipe.model_validate({"model": {"name": name}, "data": data})


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "timm:vit_tiny_patch16_224"])
def test_learning_rates_by_layer_are_timms(name):
    network = factory.build(recipe(name), 10, CPU, torch.float32)
    optimizer = optimizers.build(network, Optimizer(name="adamw", lr=1.0, layer_decay=0.75), CPU)
    optimizers.set_lr(optimizer, 2.0)
    ours = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    theirs = timm.create_model(name.removeprefix("timm:"), num_classes=10)
    groups = timm.optim.param_groups_layer_decay(theirs, layer_decay=0.75)
    names = {parameter: name for name, parameter in theirs.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            assert ours[network.get_parameter(names[parameter])] == pytest.approx(2 * group["lr_scale"])


def test_torchvisions_transformer_has_as_many_layers_as_blocks():
    with torch.device("meta"):
        network = torchvision.models.vit_b_16()
    depths = networks.depths(network)
    assert (depths["conv_proj.weight"], depths["class_token"], depths["encoder.pos_embedding"]) == (13, 13, 13)
    assert depths["encoder.layers.encoder_layer_0.mlp.0.weight"] == 12
    assert (depths["encoder.layers.encoder_layer_11.ln_1.bias"], depths["encoder.ln.weight"], depths["heads.head.bias"]) == (
        1,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("name", "classifier", "depth"),
    [
        ("resnet18", "fc", 9),
        ("regnet_y_400mf", "fc", 18),
        ("densenet121", "classifier", 59),
        ("googlenet", "fc", 10),
        ("inception_v3", "fc", 12),
        ("vit_b_16", "heads.head", 13),
        ("vgg11", "classifier.6", 10),
        ("convnext_tiny", "classifier.2", 27),
        ("efficientnet_b0", "classifier.1", 20),
        ("maxvit_t", "classifier.5", 9),
        ("mnasnet0_5", "classifier.1", 24),
        ("mobilenet_v3_small", "classifier.3", 16),
        ("squeezenet1_1", "classifier.1", 9),
    ],
)
def test_learning_rates_decrease_from_the_classifier_to_the_first_layer(name, classifier, depth):
    # RegNets compute their widths with tensors; the others need no memory.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        network = networks.build(recipe(name), 10)
    groups = optimizers.build(network, Optimizer(lr=0.1, layer_decay=0.5), CPU).param_groups
    scales = {parameter: group["lr_scale"] for group in groups for parameter in group["params"]}
    ordered = [scales[parameter] for parameter in network.parameters()]
    assert ordered == sorted(ordered)
    assert {scales[p] for p in network.get_submodule(classifier).parameters()} == {1}
    assert ordered[0] == 0.5**depth


@pytest.mark.parametrize(("name", "blocks"), [("poolformer_s12", 12), ("pit_s_224", 12), ("caformer_s18", 18)])
def test_learning_rates_by_layer_tell_the_blocks_of_a_stage_apart(name, blocks):
    with torch.device("meta"):
        network = timm.create_model(name, num_classes=10)
    assert not hasattr(network, "group_matcher")
    depths = networks.depths(network)
    by_block = {}
    for parameter, depth in depths.items():
        if match := re.match(r"\w+\.\d+\.blocks\.\d+\.", parameter):
            by_block.setdefault(match[0], set()).add(depth)
    assert len(by_block) == blocks and all(len(found) == 1 for found in by_block.values())
    assert len({depth for found in by_block.values() for depth in found}) == blocks


def test_learning_rates_by_layer_need_blocks():
    network = nn.Sequential(OrderedDict(first=nn.Conv2d(3, 4, 3), second=nn.Linear(4, 2)))
    with pytest.raises(UserError, match=r"--optimizer\.layer-decay: the network has no numbered blocks"):
        optimizers.build(network, Optimizer(lr=0.1, layer_decay=0.5), CPU)
    assert {group["lr_scale"] for group in optimizers.build(network, Optimizer(lr=0.1, head_lr=2), CPU).param_groups} == {
        1,
        2,
    }
