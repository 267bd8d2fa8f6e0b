"""The weights alone, under the names of the library that the network is from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from worldsize.config.recipe import Recipe, own_network
from worldsize.errors import CheckpointError
from worldsize.inference.export.base import Format, Options, Runner, Source
from worldsize.inference.export.served import Served
from worldsize.models import factory, networks

FILE = "model.safetensors"


class Form(Format):
    """model.safetensors, which any program with the network can load."""

    options = ("temperature",)

    def check(self, recipe: Recipe, options: Options) -> None:
        """It expresses every network."""

    def write(self, folder: Path, source: Source, options: Options) -> list[str]:
        save(folder / FILE, source.found.network)
        loaded = f"safetensors.torch.load_file({FILE!r})"
        if source.recipe.model.name.startswith("mnasnet"):
            lines = ["state = network.state_dict()  # with the version that a MNASNet requires", f"state.update({loaded})"]
            return [*_build(source), *lines, "network.load_state_dict(state)"]
        return [*_build(source), f"network.load_state_dict({loaded})"]

    def open(self, folder: Path, about: dict[str, Any], recipe: Recipe, classes: int) -> Runner:
        network = factory.build(recipe, classes, torch.device("cpu"), torch.float32)
        load(network, folder / FILE)
        return _Torch(Served(network, about["temperature"]))


def _build(source: Source) -> list[str]:
    """Lines of Python that build the network, with the changes that we make to the library's."""
    settings, network = source.recipe.model, source.found.network
    if own_network.is_own(settings.name):
        function = own_network.function(settings.name)
        return [f"# {function} is in model.source of recipe.yaml", f"network = {function}({len(source.found.classes)})"]
    library, _, name = settings.name.rpartition(":")
    if library == "worldsize":
        built = f"network = from_worldsize.NETWORKS[{name!r}]({len(source.found.classes)})"
        return ["from worldsize.models.networks import from_worldsize", built]
    options = f"{name!r}, num_classes={len(source.found.classes)}"
    if library and getattr(network, "pretrained_cfg", {}).get("fixed_input_size"):
        options += f", img_size={source.recipe.data.train_crop_size}"
    if name in ("googlenet", "inception_v3") and not library:
        options += ", aux_logits=False, init_weights=False"
    lines = [f"network = timm.create_model({options})" if library else f"network = torchvision.models.get_model({options})"]
    if settings.stem == "cifar":
        lines += [
            "network.conv1 = torch.nn.Conv2d(3, network.conv1.out_channels, 3, padding=1, bias=False)  # CIFAR stem",
            "network.maxpool = torch.nn.Identity()",
        ]
    if settings.blurpool:
        lines.append(
            "worldsize.models.blurpool.blur(network)  # blurs the input of each convolution with a stride and 16 channels"
        )
    return lines


class _Torch(Runner):
    def __init__(self, network: nn.Module) -> None:
        self._network = network.eval()

    def network(self) -> nn.Module:
        return self._network


def save(path: Path, network: nn.Module) -> None:
    """Write the network's weights, float32 and contiguous."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt"})


def load(network: nn.Module, path: Path) -> None:
    """Load them.

    Raises:
        CheckpointError: they are those of another network.
    """
    try:
        networks.load_state(network, load_file(path))
    except RuntimeError:
        raise CheckpointError(f"{path} does not fit the network of recipe.yaml next to it") from None
