"""Initial weights: from a file, from a run, or published by torchvision or timm, through their own downloads and caches."""

from __future__ import annotations

import argparse
import logging
import pickle
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from worldsize import checkpoint
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.models import network_names, networks, state_dicts
from worldsize.models.networks import from_timm
from worldsize.models.state_dicts import State

log = logging.getLogger(__name__)

# Mean and standard deviation of the images that torchvision's GoogLeNet and Inception v3 were trained with: its builders
# convert images in ImageNet's normalization for them inside the network (transform_input).
_OF_INCEPTION = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def downloads(weights: str) -> bool:
    """Whether loading them may need the network."""
    return weights.startswith(("torchvision:", "timm:"))


def load(network: nn.Module, recipe: Recipe, classes: Sequence[str] = ()) -> None:
    """Load the recipe's initial weights into ``network``.

    A classifier of another number of classes stays as it is, and so does what the recipe's zero_head and head_bias set.

    Args:
        classes: those of the dataset in label order, to warn if the weights are of a run with others.

    Raises:
        UserError: they cannot be read, are not a state dict, or belong to another model.
        CheckpointError: they are those of a run whose checkpoints are damaged.
    """
    weights = recipe.model.weights
    assert weights is not None
    (given, theirs), own = _read(weights, recipe), network.state_dict()
    _compare_blur(network, state_dicts.blurred(given, own), weights)
    state = state_dicts.adapted(given, own)
    heads = networks.classifier_prefixes(network)
    different = state_dicts.missing(state, own) | {
        key for key, tensor in state.items() if key not in own or own[key].shape != tensor.shape
    }
    if wrong := sorted(key for key in different if not key.startswith(heads)):
        raise UserError(f"--model.weights {weights} belongs to another model: {_difference(wrong, state, own)}")
    if state_dicts.auxiliary(given, own) and ":" not in weights:
        _compare_normalization(weights, *_OF_INCEPTION, recipe)
    fitting = {k: v for k, v in state.items() if k not in different}
    if recipe.model.zero_head:
        fitting = {k: v for k, v in fitting.items() if not k.startswith(heads)}
    if recipe.model.head_bias is not None:
        fitting = {k: v for k, v in fitting.items() if k not in [f"{head}bias" for head in heads]}
    networks.load_state(network, fitting, strict=False)
    if not recipe.model.zero_head:
        others = "are for another number of classes" if any(key.startswith(heads) for key in state) else "have no classifier"
        _warn_of_classifier(recipe, any(key.startswith(heads) for key in fitting), others, theirs, classes)


def _warn_of_classifier(recipe: Recipe, kept: bool, lost: str, theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Warn if the classifier answers with other classes than the data has, or by chance.

    Args:
        lost: why it is not kept.
    """
    weights = recipe.model.weights
    other = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
    if kept and other is not None:
        log.warning(
            "the classifier of %s is kept, but its classes differ from the data's: label %d is %r there and %r here; "
            "--model.zero-head begins with a new one",
            *(weights, other, theirs[other], ours[other]),
        )
    elif not kept and recipe.max_steps == 0:
        log.warning("the weights %s %s, so the classifier has random weights: its answers are chance", weights, lost)


def _compare_blur(network: nn.Module, layers: set[str], weights: str) -> None:
    """Refuse weights of convolutions that blur for some that do not; warn of a pooling that blurs, which none does here."""
    modules = {name: module for name, module in network.named_modules() if name in layers}
    if any(type(module) is nn.Conv2d for module in modules.values()):
        raise UserError(f"--model.weights {weights} is of a network that blurs before convolutions: pass --model.blurpool")
    if pools := sorted(name for name, module in modules.items() if isinstance(module, nn.MaxPool2d)):
        log.warning(
            "the weights %s were trained with a maximum pooling that blurs (%s); here it does not, so they classify worse "
            "until they are trained again",
            weights,
            ", ".join(pools),
        )


def _difference(wrong: list[str], state: State, own: State) -> str:
    if prefix := state_dicts.prefix(state, own):
        return f"the names of the network's tensors begin with {prefix!r}: save only those, without the prefix"
    first = wrong[0]
    if first not in own:
        reason = f"{first!r}, which {len(own)} tensors of the network do not include"
    elif first not in state:
        reason = f"{first!r}, which the file lacks"
    else:
        shapes = (" x ".join(map(str, tensors[first].shape)) or "one number" for tensors in (state, own))
        reason = "{!r}: {} in the file, {} in the network".format(first, *shapes)
    return f"{len(wrong)} tensors differ, the first is {reason}"


def _read(weights: str, recipe: Recipe) -> tuple[State, Sequence[str]]:
    """The state dict, and the classes of the run that it is from; none if it is from elsewhere."""
    source, _, name = weights.partition(":")
    if source == "torchvision":
        return _from_torchvision(name, recipe), ()
    if source == "timm":
        return _from_timm(name, recipe), ()
    path = Path(weights).expanduser()
    if not path.is_dir():
        return _read_file(path), ()
    snapshot = checkpoint.read(checkpoint.find(path))
    return snapshot.average or snapshot.model, snapshot.state.get("classes", ())


def _from_torchvision(name: str, recipe: Recipe) -> State:
    from torchvision.models import get_weight

    try:
        published = get_weight(name)
    except (ValueError, KeyError, AttributeError):
        raise UserError(
            f"torchvision has no weights {name!r}: they are called like torchvision:ResNet50_Weights.IMAGENET1K_V2"
        ) from None
    transforms = published.transforms()
    converted = name.startswith(("GoogLeNet", "Inception"))
    # The others are those of detection, segmentation, video and optical flow.
    if type(transforms).__name__ != "ImageClassification" or "Quantized" in name:
        raise UserError(
            f"torchvision:{name} are not floating-point weights of an image classifier: those are called like "
            "torchvision:ResNet50_Weights.IMAGENET1K_V2"
        )
    mean, std = _OF_INCEPTION if converted else (transforms.mean, transforms.std)
    _compare_normalization(f"torchvision:{name}", mean, std, recipe)
    try:
        return dict(published.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        place = f"{torch.hub.get_dir()}/checkpoints"
        raise UserError(f"cannot download {published.url}: {error}. Or put the file into {place}") from None


def _from_timm(name: str, recipe: Recipe) -> State:
    network_names.check("--model.weights", f"timm:{name}")
    import timm

    try:
        # timm resizes the position embeddings to the recipe's image size.
        network = timm.create_model(name, pretrained=True, **from_timm.size_option(name, recipe))
    except RuntimeError as error:  # unknown names and tags
        raise UserError(f"timm has no weights {name!r} ({error}): they are called like timm:resnet50.a1_in1k") from None
    except Exception as error:  # of several libraries: no network, an unknown repository, a full disk
        raise UserError(f"cannot download the weights timm:{name}: {error}") from None
    config = cast(dict[str, Any], network.pretrained_cfg)
    _compare_normalization(f"timm:{name}", config["mean"], config["std"], recipe)
    _compare_crop(f"timm:{name}", config.get("crop_mode"))
    return dict(network.state_dict())


def _compare_normalization(weights: str, mean: Sequence[float], std: Sequence[float], recipe: Recipe) -> None:
    ours, theirs = (*recipe.data.mean, *recipe.data.std), (*mean, *std)
    if max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) > 0.01:
        log.warning(
            "the weights %s were trained with another normalization than this recipe's: pass --data.mean %s --data.std %s",
            weights,
            " ".join(f"{value:g}" for value in mean),
            " ".join(f"{value:g}" for value in std),
        )


def _compare_crop(weights: str, mode: str | None) -> None:
    """Warn of weights that timm evaluates with complete images: here, evaluation crops the center."""
    if mode in (theirs := {"squash": "squeezed into a square", "border": "with a border that makes them square"}):
        log.warning(
            "timm evaluates the weights %s with complete images, %s (its crop_mode %s); here the center of an image is "
            "cropped, so the accuracy differs from the published one",
            *(weights, theirs[mode], mode),
        )


def _read_file(path: Path) -> State:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        # torchvision's train.py and timm's save their arguments, too. Loading a namespace executes no code.
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.filterwarnings("ignore", ".*TorchScript archive")  # the error below says it
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"--model.weights {path}: file not found") from None
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        objects = f"objects other than tensors{f' ({refused[1]})' if refused else ''}"
        raise UserError(
            f"--model.weights {path} contains {objects}, which is not allowed: save the state dict alone "
            "(torch.save(network.state_dict(), FILE), where torch.load(..., weights_only=False) may read this file)"
        ) from None
    except EOFError:
        raise UserError(f"--model.weights {path} is empty or ends too early") from None
    except Exception as error:
        if "TorchScript" in str(error):
            raise UserError(f"--model.weights {path} is a TorchScript program: save its state_dict() instead") from None
        raise UserError(f"--model.weights {path} cannot be read: {error}") from None
    state, place = state_dicts.found_in(content)
    if state is None:
        raise UserError(f"--model.weights {path} is not a state dict: expected tensors by name")
    if place and (others := sorted(str(name) for name in content if "ema" in str(name).lower())):
        log.warning("--model.weights %s: its %r is used, and not %s", path, place, ", ".join(others))
    return state
