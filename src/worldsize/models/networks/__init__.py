"""Networks by name: torchvision's, with a prefix those of another library, such as ``timm:vit_small_patch16_224``, or the
user's own.

A source is one module of this package with a function ``build``, one line in `_SOURCES`, and a prefix in
`worldsize.models.network_names`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from worldsize.config.recipe import Recipe, own_network
from worldsize.errors import UserError
from worldsize.models import blurpool, dropout, network_names
from worldsize.models.networks import from_file, from_timm, from_torchvision, from_worldsize

_SOURCES: dict[str, Callable[[str, int, Recipe], nn.Module]] = {
    "": from_torchvision.build,
    "timm": from_timm.build,
    "worldsize": from_worldsize.build,
}


def build(recipe: Recipe, classes: int) -> nn.Module:
    """The recipe's network for ``classes`` classes, with the initial weights that torch's generator gives, on the CPU.

    Raises:
        UserError: unknown network, or a setting that it does not support.
    """
    settings = recipe.model
    network_names.check("--model.name", settings.name)
    if own_network.is_own(settings.name):
        network = from_file.build(recipe, classes)
    else:
        source, _, name = settings.name.rpartition(":")
        network = _SOURCES[source](name, classes, recipe)
        if settings.dropout is not None and source != "timm":  # timm has an option for it
            [name] = classifiers(network)
            dropout.apply(network, name, settings.dropout)
    if settings.blurpool and not blurpool.blur(network):
        raise UserError(f"--model.blurpool: {settings.name} has no convolution that it could blur; leave it out")
    heads = classifiers(network).values()
    if not heads and (settings.zero_head or settings.head_bias is not None):
        flag = "--model.zero-head" if settings.zero_head else "--model.head-bias"
        raise UserError(f"{flag}: {settings.name} has no linear or convolution layer as its classifier; leave it out")
    if settings.zero_head:
        for parameter in (parameter for layer in heads for parameter in layer.parameters()):
            nn.init.zeros_(parameter)
    if settings.head_bias is not None:
        _fill_biases(heads, settings.head_bias, settings.name)
    return network


def _fill_biases(heads: Iterable[nn.Module], value: float, name: str) -> None:
    for layer in heads:
        bias = getattr(layer, "bias", None)
        if bias is None:
            raise UserError(f"--model.head-bias {value:g}: the classifier of {name} has no bias")
        nn.init.constant_(bias, value)


def load_state(network: nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
    """``network.load_state_dict`` for tensors without the versions of their modules: those of a file, in the network's form.

    Some networks of torchvision (MNASNet) load nothing without a version.

    Raises:
        RuntimeError: other names or shapes.
    """
    versioned = OrderedDict(state)
    versioned._metadata = network.state_dict()._metadata  # type: ignore[attr-defined]
    network.load_state_dict(versioned, strict)


def classifiers(network: nn.Module) -> dict[str, nn.Module]:
    """The layers that compute the logits, by name: the last linear or convolution layer, or those that timm lists.

    Some of timm's networks have several, such as one for distillation, and average their logits or add them up.
    """
    names = getattr(network, "pretrained_cfg", {}).get("classifier")
    if names:
        return {name: network.get_submodule(name) for name in ([names] if isinstance(names, str) else names)}
    return dict([(name, m) for name, m in network.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))][-1:])


def classifier_prefixes(network: nn.Module) -> tuple[str, ...]:
    """What the names of the classifiers' parameters begin with, for ``str.startswith``."""
    return tuple(f"{name}." for name in classifiers(network))


def depths(network: nn.Module) -> dict[str, int]:
    """How many blocks lie behind each parameter's block: 0 for the classifiers and what else follows the last block.

    What comes before the first block counts as one block, and what is between two blocks belongs to the first of them. A
    block is an entry of torchvision's nested sequences, such as ``layer1.0``, and ``classifier.0`` if that is not the
    classifier itself, or of a stage's ``blocks``, such as ``stages.0.blocks.1``; most of timm's networks list their own.

    Raises:
        UserError: it has no blocks.
    """
    heads = classifier_prefixes(network)
    names = [name for name, _ in network.named_parameters()]
    if hasattr(network, "group_matcher"):
        found = from_timm.depths(network)
    else:
        found = _depths([name for name in names if not name.startswith(heads)])
    if not any(found.values()):
        raise UserError(
            "--optimizer.layer-decay: the network has no numbered blocks, such as layer1.0, by which the learning rate "
            "could decrease; leave it out"
        )
    return found | {name: 0 for name in names if name.startswith(heads)}


def _depths(names: list[str]) -> dict[str, int]:
    """The depths of these parameters by the numbers in their names; empty: none has a number."""
    keys = {name: _block(name) for name in names}
    order = {key: i for i, key in enumerate(dict.fromkeys(key for key in keys.values() if key))}
    if not order:
        return {}
    depth, found = len(order) + 1, {}
    for name, key in keys.items():
        depth = len(order) - order[key] if key else depth
        found[name] = depth
    for name in reversed(names):
        if keys[name]:
            break
        found[name] = 0
    return found


# A number, or a name that ends with one; the blocks of torchvision's RegNets, DenseNets and Inceptions.
_NUMBERED = r"(\w+_)?\d+(\.\d+)*(\.blocks\.\d+)?|block\d+-\d+|denselayer\d+|inception\d[a-z]|Mixed_\d[a-z]"


def _block(name: str) -> str:
    """The leading parts of a parameter's name up to the first number and numbers or ``blocks`` directly behind it.

    Empty: it has no number.
    """
    match = re.match(rf"(\w+\.)*?({_NUMBERED})(?=\.)", name)
    return match[0] if match else ""


def embeddings(network: nn.Module) -> set[str]:
    """Names of parameters without weight decay although they are not vectors: embeddings of positions and of the class.

    timm's networks list their own; torchvision's are those that the flag ``--transformer-embedding-decay`` of its reference
    script is for.
    """
    listed = getattr(network, "no_weight_decay", None)
    if listed is not None:
        patterns = listed()  # with wildcards in XCiT
        return {name for name, _ in network.named_parameters() if any(fnmatchcase(name, one) for one in patterns)}
    return {name for name, _ in network.named_parameters() if name.rpartition(".")[2] in from_torchvision.EMBEDDINGS}
